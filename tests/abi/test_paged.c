/* Paged store and load: coordinator and rank in one program. */
#include "paged.h"

#define CHUNKS 6u
#define TOKENS (CHUNKS * C)
#define BLOCKS (TOKENS / B)

static struct pages pages;
static uint32_t stored_at[BLOCKS], loaded_at[BLOCKS];
static kvt_key root, keys[CHUNKS];

static void make_keys(const uint8_t fingerprint[32])
{
    uint32_t tokens[TOKENS];
    size_t n;
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = 1000 + i * 3;
    OK(kvt_key_root(fingerprint, NULL, 0, &root));
    OK(kvt_keys(&root, C, tokens, TOKENS, NULL, 0, keys, CHUNKS, &n));
    CHECK(n == CHUNKS);
}

/* Gets slots for the chunks [first, first + n). An arena grows behind its use, so that
 * the first wishes may be declined: then the operation is given up, and a new one is
 * tried. Returns the session. */
static uint64_t begin_store(kvt_coord coord, uint64_t *op, uint32_t first, uint32_t n, kvt_verdict *verdicts)
{
    for (int tries = 0; tries < 1000; tries++) {
        kvt_store_begin_req req;
        uint64_t session;
        uint32_t granted = 0;
        struct timespec pause = {0, 5000000};

        KVT_INIT(req);
        req.op = ++*op;
        req.first_ordinal = first;
        req.parent = first == 0 ? root : keys[first - 1];
        req.keys = &keys[first];
        req.n = n;
        req.verdicts = verdicts;
        OK(kvt_store_begin(coord, &req, 1, 5000, &session));
        CHECK_RC(req.status, KVT_OK);
        CHECK(session != 0);
        while (granted < n && verdicts[granted].code == KVT_GRANTED)
            granted++;
        if (granted == n)
            return session;
        CHECK(verdicts[granted].code == KVT_DECLINED || verdicts[granted].code == KVT_PENDING);
        OK(kvt_cancel(coord, *op, KVT_CANCEL_UNSENT));
        nanosleep(&pause, NULL);
    }
    CHECK(!"slots are granted");
    return 0;
}

/* Stores the chunks [first, first + n) and returns the session. */
static uint64_t store(kvt_coord coord, kvt_rank rank, uint32_t first, uint32_t n)
{
    static uint64_t op;
    kvt_verdict verdicts[CHUNKS];
    kvt_grant grants[CHUNKS];
    kvt_store_op s;
    uint64_t session = begin_store(coord, &op, first, n, verdicts);

    memset(grants, 0, sizeof grants);
    for (uint32_t i = 0; i < n; i++) {
        grants[i].index = i;
        grants[i].slot = verdicts[i].slot;
        grants[i].generation = verdicts[i].generation;
    }
    KVT_INIT(s);
    s.op = op;
    s.first_ordinal = first;
    s.session = session + 1;
    s.grants = grants;
    s.ngrants = n;
    s.blocks = &stored_at[first * C / B];
    s.nblocks = n * C / B;
    CHECK_RC(kvt_store(rank, &s), KVT_E_STALE); /* another leader's: nothing happens */
    s.session = session;
    OK(kvt_store(rank, &s));
    return session;
}

/* Loads the tokens [lo, hi), which may begin and end inside chunks and blocks. */
static void load(kvt_cache cache, kvt_coord coord, kvt_rank rank, uint64_t op, uint32_t lo, uint32_t hi)
{
    uint32_t first = lo / C, n = (hi + C - 1) / C - first;
    kvt_verdict verdicts[CHUNKS];
    kvt_load_op l;
    kvt_event e;
    uint64_t session;

    lease_all(coord, op, keys, first + n);
    OK(kvt_load_begin(coord, op, op, first, &keys[first], n, 5000, verdicts, &session));
    CHECK(verdicts[0].code == KVT_READY);
    wipe_pages(&pages);
    KVT_INIT(l);
    l.op = op;
    l.session = session;
    l.nchunks = n;
    l.first_token = lo;
    l.tokens = hi - lo;
    l.blocks = &loaded_at[lo / B];
    l.nblocks = (hi + B - 1) / B - lo / B;
    l.verdicts = verdicts;
    l.nverdicts = n;
    OK(kvt_load(rank, &l));
    e = next_event(cache);
    CHECK(e.kind == KVT_EVENT_LOAD && e.op == op && e.handle == rank);
    CHECK_RC(e.status, KVT_OK);
    CHECK(e.failed_chunk == n && e.tokens == hi - lo);
    check_tokens(&pages, loaded_at, TOKENS, lo, hi);
}

/* Loads that cannot be: each reports exactly once and touches nothing. */
static void failed_loads(kvt_cache cache, kvt_rank rank, uint64_t session)
{
    kvt_verdict gone = {KVT_READY, 3, 77, 0};
    kvt_load_op l;
    kvt_event e;
    size_t n;

    KVT_INIT(l);
    l.op = 200000;
    l.nchunks = 1;
    l.tokens = C;
    l.blocks = loaded_at;
    l.nblocks = C / B;
    wipe_pages(&pages);
    for (int i = 0; i < 3; i++) {
        static const int32_t want[] = {KVT_E_STALE, KVT_E_STALE, KVT_E_MISS};
        l.op++;
        l.session = i == 0 ? 0 : i == 1 ? session + 1 : session;
        l.verdicts = &gone;
        l.nverdicts = i > 0;
        OK(kvt_load(rank, &l));
        e = next_event(cache);
        CHECK(e.op == l.op && e.tokens == 0 && e.failed_chunk == 0);
        CHECK_RC(e.status, want[i]);
    }
    check_tokens(&pages, loaded_at, TOKENS, 0, 0);

    /* Not even begun: no event. */
    l.nblocks--;
    CHECK_RC(kvt_load(rank, &l), KVT_E_ARG);
    l.nblocks++;
    l.nchunks = 2;
    l.nverdicts = 0;
    CHECK_RC(kvt_load(rank, &l), KVT_E_ARG);
    CHECK_SAYS("nchunks");
    l.nchunks = 1;
    l.tokens = UINT64_C(1) << 40;
    CHECK_RC(kvt_load(rank, &l), KVT_E_ARG);
    OK(kvt_load_cancel(rank, l.op));
    OK(kvt_poll(cache, &e, 1, &n));
    CHECK(n == 0);
}

/* A number of the leader's, which stands once in the statistics of one group. */
static int group_number(kvt_cache cache, const char *name)
{
    static char text[1 << 16];
    char key[64];
    size_t n;
    const char *at;
    OK(kvt_stats(cache, text, sizeof text, &n));
    CHECK((size_t)snprintf(key, sizeof key, "\"%s\":", name) < sizeof key);
    at = strstr(text, "\"groups\":[{");
    CHECK(at != NULL);
    at = strstr(at, key);
    CHECK(at != NULL);
    return atoi(at + strlen(key));
}

/* A load that began at the leader and that kvt_load does not take: nothing is left of
 * it, without a cancel. */
static void refused_loads(kvt_cache cache, kvt_coord coord, kvt_rank rank)
{
    for (int wrong = 0; wrong < 7; wrong++) {
        kvt_verdict verdicts[CHUNKS];
        uint64_t op = 250000 + (uint64_t)wrong, session;
        kvt_load_op l;
        kvt_event e;
        size_t n;

        lease_all(coord, op, keys, CHUNKS);
        OK(kvt_load_begin(coord, op, op, 0, keys, CHUNKS, 5000, verdicts, &session));
        CHECK(verdicts[0].code == KVT_READY);
        CHECK(group_number(cache, "loads_running") == 1 && group_number(cache, "slots_charged") > 0);
        KVT_INIT(l);
        l.op = op;
        l.session = session;
        l.nchunks = CHUNKS;
        l.tokens = TOKENS;
        l.blocks = loaded_at;
        l.nblocks = BLOCKS;
        l.verdicts = verdicts;
        l.nverdicts = CHUNKS;
        switch (wrong) {
        case 0: l.blocks = NULL; break;
        case 1: l.verdicts = NULL; break;
        case 2: l.nverdicts = CHUNKS + 1; break;
        case 3: l.nblocks = (size_t)1 << 30; break;
        case 4: l.nblocks--; break;
        case 5: l.nchunks++; break;
        case 6: l.first_token = UINT64_C(1) << 40; break;
        }
        CHECK_RC(kvt_load(rank, &l), KVT_E_ARG);
        for (int tries = 0; group_number(cache, "loads_running") > 0; tries++) {
            struct timespec pause = {0, 5000000};
            CHECK(tries < 2000);
            nanosleep(&pause, NULL);
        }
        CHECK(group_number(cache, "slots_charged") == 0);
        OK(kvt_poll(cache, &e, 1, &n));
        CHECK(n == 0);
    }
}

static void check_accepted(const kvt_accepted *a)
{
    CHECK(a->struct_size == sizeof *a);
    CHECK(a->chunk_tokens == C && a->block_tokens == B && a->dcp == 1 && a->interleave == 1);
    CHECK(a->session != 0 && a->slots > CHUNKS);
    CHECK(a->slot_bytes >= (uint64_t)C * LAYERS * (KV + VALUES + SCALES) && a->slot_bytes % 4096 == 0);
    CHECK(a->dram_bytes == 64 << 20 && a->disk_bytes == 256 << 20);
}

static void run(int again)
{
    kvt_cache cache = open_leader();
    kvt_coord coord;
    kvt_rank rank;
    kvt_accepted a, b;
    kvt_hits hits;
    uint64_t session;

    OK(kvt_coordinate(cache, "g", 1, &coord));
    KVT_INIT(hits);
    CHECK(kvt_lease_result(coord, 5, 0, 0, &hits) != KVT_OK);
    rank = register_pages(cache, "g", &pages);
    KVT_INIT(a);
    KVT_INIT(b);
    OK(kvt_coord_ready(coord, 10000, &a));
    OK(kvt_rank_ready(rank, 10000, &b));
    CHECK(memcmp(&a, &b, sizeof a) == 0);
    check_accepted(&a);
    OK(kvt_coord_session(coord, &session));
    CHECK(session == a.session);
    make_keys(a.fingerprint);

    if (!again) {
        wipe_pages(&pages);
        fill_tokens(&pages, stored_at, TOKENS);
        CHECK(store(coord, rank, 0, 2) == session);
        CHECK(store(coord, rank, 2, CHUNKS - 2) == session);
        OK(kvt_fence(rank, stored_at, BLOCKS, 1000));
    }
    load(cache, coord, rank, 100000, 0, TOKENS);
    load(cache, coord, rank, 100001, 37, TOKENS - 11); /* clipped inside chunks and blocks */
    load(cache, coord, rank, 100002, 2 * C + 3, 2 * C + 5);
    failed_loads(cache, rank, session);
    refused_loads(cache, coord, rank);

    OK(kvt_renew(coord, (uint64_t[]){100000, 100001, 12345}, 3));
    OK(kvt_release(coord, 777));
    OK(kvt_cancel(coord, 300000, KVT_CANCEL_UNSENT));
    OK(kvt_unregister(rank, 10000));
    CHECK_RC(kvt_unregister(rank, 10000), KVT_E_HANDLE);
    OK(kvt_coord_close(coord));
    OK(kvt_close(cache, 10000));
}

static void reset(void)
{
    kvt_cache cache = open_leader();
    kvt_coord coord;
    uint8_t a[16], b[16];
    OK(kvt_coordinate(cache, "g", 1, &coord));
    memset(a, 0, sizeof a);
    memset(b, 0, sizeof b);
    (void)kvt_reset(coord, a);
    (void)kvt_reset(coord, b);
    CHECK(memcmp(a, b, sizeof a) != 0);
    OK(kvt_close(cache, 10000));
}

int main(void)
{
    for (uint32_t i = 0; i < BLOCKS; i++) {
        stored_at[i] = (i * 7 + 5) % NBLOCKS;
        loaded_at[i] = (i * 11 + 2) % NBLOCKS;
    }
    make_root();
    make_pages(&pages, 1, 1, 0);
    run(0);
    run(1); /* from disk */
    reset();
    free_pages(&pages);
    return 0;
}
