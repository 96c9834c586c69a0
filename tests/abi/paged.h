/* paged.h - one rank's pages in plain memory, and what has to be in them. */
#ifndef PAGED_H
#define PAGED_H

#include <poll.h>
#include <time.h>

#include "root.h"

#define B 16u       /* tokens of a block, on one rank */
#define C 64u       /* tokens of a chunk */
#define NBLOCKS 64u /* of the page pool */
#define LAYERS 2u
#define KV 48u     /* bytes of a token in a layer */
#define VALUES 32u /* the indexer's page of a block: B x 32 bytes, then B x 4 */
#define SCALES 4u
#define UNTOUCHED 0xee

struct pages {
    uint32_t d, i, rank;          /* DCP size, interleave, this rank */
    uint8_t *kv[LAYERS];          /* NBLOCKS x B x KV */
    uint8_t *indexer[LAYERS];     /* NBLOCKS x B x (VALUES + SCALES) */
    kvt_region regions[LAYERS * 3];
};

static kvt_region region_of(const char *name, unsigned layer, uint32_t bytes, void *base, int64_t block, int64_t token)
{
    kvt_region r;
    KVT_INIT(r);
    strcpy(r.name, name);
    strcpy(r.component, "target");
    r.layer = (int32_t)layer;
    r.head = -1;
    r.bytes = bytes;
    r.base = base;
    r.block_stride = block;
    r.token_stride = token;
    return r;
}

static void make_pages(struct pages *p, uint32_t d, uint32_t i, uint32_t rank)
{
    p->d = d;
    p->i = i;
    p->rank = rank;
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        p->kv[layer] = malloc(NBLOCKS * B * KV);
        p->indexer[layer] = malloc(NBLOCKS * B * (VALUES + SCALES));
        CHECK(p->kv[layer] != NULL && p->indexer[layer] != NULL);
        p->regions[layer * 3] = region_of("kv", layer, KV, p->kv[layer], B * KV, KV);
        p->regions[layer * 3 + 1] =
            region_of("indexer", layer, VALUES, p->indexer[layer], B * (VALUES + SCALES), VALUES);
        p->regions[layer * 3 + 2] =
            region_of("indexer.scale", layer, SCALES, p->indexer[layer] + B * VALUES, B * (VALUES + SCALES), SCALES);
    }
}

static void wipe_pages(struct pages *p)
{
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        memset(p->kv[layer], UNTOUCHED, NBLOCKS * B * KV);
        memset(p->indexer[layer], UNTOUCHED, NBLOCKS * B * (VALUES + SCALES));
    }
}

static void free_pages(struct pages *p)
{
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        free(p->kv[layer]);
        free(p->indexer[layer]);
    }
}

/* What byte `at` of a token's row is. Never UNTOUCHED. */
static uint8_t oracle(unsigned region, uint32_t token, uint32_t at)
{
    uint32_t x = token * 2654435761u ^ region * 40503u ^ at * 69069u;
    x ^= x >> 15;
    x = x * 2246822519u % 238u;
    return (uint8_t)x;
}

/* Runs over the bytes of a token on this rank: writes what they have to be, or
 * counts those that are not `want` (-1: what they have to be). */
static unsigned over_token(const struct pages *p, const uint32_t *table, uint32_t token, int write, int want)
{
    uint32_t v = B * p->d, o = token % v, bad = 0;
    if (o / p->i % p->d != p->rank)
        return 0;
    uint32_t local = o / (p->d * p->i) * p->i + o % p->i;
    for (unsigned n = 0; n < LAYERS * 3; n++) {
        const kvt_region *r = &p->regions[n];
        uint8_t *bytes = (uint8_t *)r->base + (int64_t)table[token / v] * r->block_stride + (int64_t)local * r->token_stride;
        for (uint32_t at = 0; at < r->bytes; at++) {
            if (write)
                bytes[at] = oracle(n, token, at);
            else
                bad += bytes[at] != (want < 0 ? oracle(n, token, at) : (uint8_t)want);
        }
    }
    return bad;
}

static inline void fill_tokens(const struct pages *p, const uint32_t *table, uint32_t tokens)
{
    for (uint32_t t = 0; t < tokens; t++)
        over_token(p, table, t, 1, 0);
}

/* The tokens [lo, hi) of `tokens` are right, and no other byte was touched. */
static inline void check_tokens(const struct pages *p, const uint32_t *table, uint32_t tokens, uint32_t lo, uint32_t hi)
{
    for (uint32_t t = 0; t < tokens; t++) {
        unsigned bad = over_token(p, table, t, 0, t >= lo && t < hi ? -1 : UNTOUCHED);
        if (bad != 0) {
            fprintf(stderr, "rank %u, token %u of [%u, %u): %u bytes are wrong\n", p->rank, t, lo, hi, bad);
            exit(1);
        }
    }
}

static kvt_rank register_pages(kvt_cache cache, const char *group, const struct pages *p)
{
    char json[512];
    kvt_rank rank = 0;
    snprintf(json, sizeof json,
             "{\"group\": \"%s\", \"ranks\": %u, \"rank\": %u, \"model\": \"paged\", \"chunk_tokens\": %u, "
             "\"block_tokens\": %u, \"num_blocks\": %u, \"dcp\": %u, \"dcp_rank\": %u, \"interleave\": %u, "
             "\"kv_dtype\": \"u8\", \"provenance\": {\"test\": \"paged\"}%s}",
             group, p->d, p->rank, C, B, NBLOCKS, p->d, p->rank, p->i, p->rank == 0 ? ", \"weights\": \"00ff\"" : "");
    OK(kvt_register(cache, json, strlen(json), p->regions, LAYERS * 3, &rank));
    return rank;
}

/* The next completion, waited for behind the eventfd. */
static inline kvt_event next_event(kvt_cache cache)
{
    kvt_event event;
    kvt_record records[16];
    size_t n = 0;
    struct pollfd p = {-1, POLLIN, 0};
    OK(kvt_eventfd(cache, &p.fd));
    for (int tries = 0; tries < 200; tries++) {
        size_t lines;
        OK(kvt_poll(cache, &event, 1, &n));
        if (n == 1)
            return event;
        /* It is readable for log records, too: take them, else it stays so. */
        OK(kvt_log_poll(cache, records, 16, &lines));
        CHECK(poll(&p, 1, 10000) >= 0);
    }
    CHECK(!"an event came");
    return event;
}

/* Waits until the leading n keys are verified in DRAM and pinned by this lease. */
static inline void lease_all(kvt_coord coord, uint64_t lease, const kvt_key *keys, size_t n)
{
    kvt_hits hits;
    uint32_t answer = 0;
    for (int tries = 0; tries < 200; tries++) {
        KVT_INIT(hits);
        int32_t rc = kvt_lease(coord, lease, keys, n, KVT_LEASE_PREFETCH | KVT_LEASE_PIN);
        if (rc == KVT_E_BUSY)
            continue;
        CHECK_RC(rc, KVT_OK);
        OK(kvt_lease_result(coord, lease, answer, 5000, &hits));
        CHECK(hits.answer > answer && hits.session != 0);
        answer = hits.answer;
        if (hits.resident == n && hits.leased == n)
            return;
        struct timespec pause = {0, 5000000};
        nanosleep(&pause, NULL);
    }
    fprintf(stderr, "held %u, resident %u, leased %u of %zu\n", hits.held, hits.resident, hits.leased, n);
    exit(1);
}

#endif
