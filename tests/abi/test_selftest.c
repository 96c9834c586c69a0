/* The self-test of two ranks, each in a thread of its own: passed, failed, alone. */
#include "paged.h"

#include <pthread.h>

#define RANKS 2u

static struct pages pages[RANKS];
static kvt_rank ranks[RANKS];

struct call {
    pthread_t thread;
    kvt_rank rank;
    uint32_t flags, timeout_ms;
    int32_t code;
    char text[512];
};

static void *call_selftest(void *p)
{
    struct call *c = p;
    c->code = kvt_selftest(c->rank, c->flags, c->timeout_ms);
    c->text[0] = 0;
    if (c->code != KVT_OK)
        kvt_last_error(c->text, sizeof c->text);
    return NULL;
}

/* Ranks 0 .. n-1 call it; what each was told is left in calls. */
static void selftest(struct call calls[RANKS], uint32_t flags, uint32_t n, uint32_t timeout_ms)
{
    for (uint32_t r = 0; r < n; r++) {
        calls[r].rank = ranks[r];
        calls[r].flags = flags;
        calls[r].timeout_ms = timeout_ms;
        CHECK(pthread_create(&calls[r].thread, NULL, call_selftest, &calls[r]) == 0);
    }
    for (uint32_t r = 0; r < n; r++)
        CHECK(pthread_join(calls[r].thread, NULL) == 0);
}

static void check_untouched(const struct pages *p)
{
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        for (uint32_t i = 0; i < NBLOCKS * B * KV; i++)
            CHECK(p->kv[layer][i] == UNTOUCHED);
        for (uint32_t i = 0; i < NBLOCKS * B * (VALUES + SCALES); i++)
            CHECK(p->indexer[layer][i] == UNTOUCHED);
    }
}

static void open_ranks(kvt_cache cache, const char *group)
{
    kvt_accepted a;
    for (uint32_t r = 0; r < RANKS; r++)
        ranks[r] = register_pages(cache, group, &pages[r]);
    for (uint32_t r = 0; r < RANKS; r++) {
        KVT_INIT(a);
        OK(kvt_rank_ready(ranks[r], 20000, &a));
    }
}

static void close_ranks(void)
{
    for (uint32_t r = 0; r < RANKS; r++)
        OK(kvt_unregister(ranks[r], 10000));
}

int main(void)
{
    struct call calls[RANKS];
    kvt_cache cache;

    make_root();
    cache = open_leader();
    for (uint32_t r = 0; r < RANKS; r++) {
        make_pages(&pages[r], RANKS, 4, r);
        wipe_pages(&pages[r]);
    }
    open_ranks(cache, "right");
    for (uint32_t flags = 0; flags <= KVT_SELFTEST_PAGES; flags++) {
        selftest(calls, flags, RANKS, 20000);
        for (uint32_t r = 0; r < RANKS; r++) {
            CHECK_RC(calls[r].code, KVT_OK);
            check_untouched(&pages[r]);
        }
    }
    /* Alone: bounded, and nothing is proven. */
    selftest(calls, KVT_SELFTEST_PAGES, 1, 200);
    CHECK_RC(calls[0].code, KVT_E_TIMEOUT);
    CHECK(strstr(calls[0].text, "[1]") != NULL);
    check_untouched(&pages[0]);
    close_ranks();

    /* The scales of one rank lie in the values. All ranks hear where. */
    pages[1].regions[2].base = (uint8_t *)pages[1].regions[2].base - 8;
    open_ranks(cache, "wrong");
    selftest(calls, KVT_SELFTEST_PAGES, RANKS, 20000);
    for (uint32_t r = 0; r < RANKS; r++) {
        CHECK_RC(calls[r].code, KVT_E_SELFTEST);
        CHECK(strstr(calls[r].text, "indexer") != NULL && strstr(calls[r].text, "token") != NULL);
        CHECK(strcmp(calls[r].text, calls[0].text) == 0);
        check_untouched(&pages[r]);
    }
    close_ranks();
    CHECK_RC(kvt_selftest(ranks[0], 0, 100), KVT_E_HANDLE);

    OK(kvt_close(cache, 10000));
    for (uint32_t r = 0; r < RANKS; r++)
        free_pages(&pages[r]);
    return 0;
}
