/* Whole chunks: open, put, get, statistics, close, and again after a restart. */
#include "root.h"

#define CHUNK 65536
#define TOKENS 16
#define N 8

static kvt_key root, keys[N];
static uint8_t payload[CHUNK], read_back[CHUNK];

static void fill(uint8_t *p, unsigned i)
{
    for (size_t at = 0; at < CHUNK; at++)
        p[at] = (uint8_t)(at * 31 + at / 251 + i * 97 + 1);
}

static kvt_blob open_blob(kvt_cache cache, uint8_t fingerprint[32])
{
    static const char json[] = "{\"model\": \"test\", \"chunk_bytes\": 65536, \"chunk_tokens\": 16}";
    kvt_blob blob = 0;
    OK(kvt_blob_open(cache, json, sizeof json - 1, &blob));
    OK(kvt_blob_ready(blob, 10000, fingerprint));
    return blob;
}

static void make_keys(const uint8_t fingerprint[32])
{
    uint32_t tokens[N * TOKENS];
    size_t n;
    for (uint32_t i = 0; i < N * TOKENS; i++)
        tokens[i] = i * i;
    OK(kvt_key_root(fingerprint, NULL, 0, &root));
    OK(kvt_keys(&root, TOKENS, tokens, N * TOKENS, NULL, 0, keys, N, &n));
    CHECK(n == N);
}

static void stats(kvt_cache cache)
{
    size_t need = 0, again = 0;
    char small[8], *text;
    CHECK_RC(kvt_stats(cache, small, sizeof small, &need), KVT_E_BUFFER);
    CHECK(need > sizeof small);
    text = malloc(need * 2);
    OK(kvt_stats(cache, text, need * 2, &again));
    CHECK(strlen(text) + 1 == again);
    CHECK(text[0] == '{' && text[again - 2] == '}');
    free(text);
}

static void log_records(kvt_cache cache)
{
    kvt_record records[64];
    size_t n = 0;
    OK(kvt_log_poll(cache, records, 64, &n));
    CHECK(n >= 1);
    for (size_t i = 0; i < n; i++) {
        CHECK(records[i].level >= KVT_LOG_DEBUG && records[i].level <= KVT_LOG_ERROR);
        CHECK(records[i].time_ns > 1700000000000000000);
        CHECK(strnlen(records[i].text, sizeof records[i].text) < sizeof records[i].text);
        CHECK(records[i].text[0] != '\0');
    }
}

static void first_run(void)
{
    uint8_t fingerprint[32];
    uint32_t held, resident;
    kvt_cache cache = open_leader();
    kvt_blob blob = open_blob(cache, fingerprint);

    make_keys(fingerprint);
    OK(kvt_lookup(blob, keys, N, &held, &resident));
    CHECK(held == 0 && resident == 0);
    CHECK_RC(kvt_get(blob, &keys[0], read_back, CHUNK, 1000), KVT_E_MISS);

    for (unsigned i = 0; i < N; i++) {
        fill(payload, i);
        OK(kvt_put(blob, &keys[i], i == 0 ? &root : &keys[i - 1], i, payload, CHUNK, 5000));
    }
    fill(payload, 0);
    OK(kvt_put(blob, &keys[0], NULL, 0, payload, CHUNK, 5000)); /* held already */
    CHECK_RC(kvt_put(blob, &keys[0], NULL, 0, payload, CHUNK - 1, 5000), KVT_E_ARG);
    CHECK_SAYS("65535");
    CHECK_RC(kvt_get(blob, &keys[0], read_back, CHUNK - 1, 5000), KVT_E_ARG);

    OK(kvt_lookup(blob, keys, N, &held, &resident));
    CHECK(held == N && resident == N);
    OK(kvt_lookup(blob, keys, N, NULL, NULL));
    for (unsigned i = N; i-- > 0;) {
        fill(payload, i);
        OK(kvt_get(blob, &keys[i], read_back, CHUNK, 5000));
        CHECK(memcmp(payload, read_back, CHUNK) == 0);
    }

    OK(kvt_remove(blob, &keys[N - 1], 1));
    OK(kvt_lookup(blob, keys, N, &held, &resident));
    CHECK(held == N - 1);
    CHECK_RC(kvt_get(blob, &keys[N - 1], read_back, CHUNK, 1000), KVT_E_MISS);

    OK(kvt_flush(cache, 10000));
    stats(cache);
    log_records(cache);
    OK(kvt_blob_close(blob));
    CHECK_RC(kvt_blob_close(blob), KVT_E_HANDLE);
    OK(kvt_close(cache, 10000));
    CHECK_RC(kvt_close(cache, 10000), KVT_E_HANDLE);
}

/* A second opening in the same process is a restart as far as the disk can tell. */
static void second_run(void)
{
    uint8_t fingerprint[32];
    uint32_t held, resident;
    kvt_cache cache = open_leader();
    kvt_blob blob = open_blob(cache, fingerprint);

    make_keys(fingerprint);
    OK(kvt_lookup(blob, keys, N, &held, &resident));
    CHECK(held == N - 1 && resident == 0);
    for (unsigned i = 0; i < N - 1; i++) {
        fill(payload, i);
        memset(read_back, 0, CHUNK);
        OK(kvt_get(blob, &keys[i], read_back, CHUNK, 5000));
        CHECK(memcmp(payload, read_back, CHUNK) == 0);
    }
    OK(kvt_close(cache, 10000));
    CHECK_RC(kvt_lookup(blob, keys, N, &held, &resident), KVT_E_HANDLE); /* ended with its cache */
}

/* The same root twice in one process is one cache, counted. */
static void counted(void)
{
    uint8_t fingerprint[32];
    kvt_cache a = open_leader(), b = open_leader();
    kvt_blob blob;
    CHECK(a != b);
    OK(kvt_close(a, 10000));
    blob = open_blob(b, fingerprint);
    fill(payload, 0);
    OK(kvt_get(blob, &keys[0], read_back, CHUNK, 5000));
    CHECK(memcmp(payload, read_back, CHUNK) == 0);
    OK(kvt_close(b, 10000));
}

int main(void)
{
    make_root();
    first_run();
    second_run();
    counted();
    return 0;
}
