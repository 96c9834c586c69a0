/*
 * Opens a cache in a directory, computes the keys of a prompt, puts the chunks that
 * are not held yet and gets all of them back. Run it twice: the second run finds on
 * disk what the first one stored.
 *
 *   cc -Iinclude examples/c/put_get.c -Lbuild -lkvtier -Wl,-rpath,$PWD/build -o put_get
 *   ./put_get /var/tmp/kv
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"

#define CHUNKS 4
#define CHUNK_TOKENS 256
#define CHUNK_BYTES (1 << 20)

static void need(int32_t code, const char *what)
{
    char why[1024];
    if (code == KVT_OK)
        return;
    kvt_last_error(why, sizeof why);
    fprintf(stderr, "%s: %s: %s\n", what, kvt_strerror(code), why);
    exit(1);
}

/* Stands for the KV cache that an engine computes. */
static void compute(unsigned char *kv, unsigned chunk)
{
    for (size_t i = 0; i < CHUNK_BYTES; i++)
        kv[i] = (unsigned char)(i * 31 + i / 4096 + chunk);
}

int main(int argc, char **argv)
{
    static unsigned char kv[CHUNK_BYTES], back[CHUNK_BYTES];
    static uint32_t prompt[CHUNKS * CHUNK_TOKENS];
    static char stats[1 << 16];
    char settings[1024], blob_settings[128];
    uint8_t fingerprint[32];
    kvt_cache cache;
    kvt_blob blob;
    kvt_key root, keys[CHUNKS];
    uint32_t held;
    size_t n;

    if (argc != 2) {
        fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
        return 2;
    }
    snprintf(settings, sizeof settings, "{\"disk_path\": \"%s\", \"dram_gib\": 0.125, \"disk_gib\": 1}", argv[1]);
    need(kvt_open(settings, strlen(settings), &cache), "open");
    need(kvt_wait_open(cache, 10000), "wait for the cache");

    snprintf(blob_settings, sizeof blob_settings, "{\"model\": \"example\", \"chunk_bytes\": %d, \"chunk_tokens\": %d}",
             CHUNK_BYTES, CHUNK_TOKENS);
    need(kvt_blob_open(cache, blob_settings, strlen(blob_settings), &blob), "open the chunks of a model");
    need(kvt_blob_ready(blob, 10000, fingerprint), "wait for the chunks of a model");

    for (uint32_t i = 0; i < CHUNKS * CHUNK_TOKENS; i++)
        prompt[i] = i;
    need(kvt_key_root(fingerprint, NULL, 0, &root), "root");
    need(kvt_keys(&root, CHUNK_TOKENS, prompt, CHUNKS * CHUNK_TOKENS, NULL, 0, keys, CHUNKS, &n), "keys");

    need(kvt_lookup(blob, keys, n, &held, NULL), "lookup");
    printf("%u of %zu chunks were there\n", (unsigned)held, n);
    for (unsigned i = held; i < n; i++) {
        compute(kv, i);
        need(kvt_put(blob, &keys[i], i == 0 ? NULL : &keys[i - 1], i, kv, CHUNK_BYTES, 5000), "put");
    }
    for (unsigned i = 0; i < n; i++) {
        need(kvt_get(blob, &keys[i], back, CHUNK_BYTES, 5000), "get");
        compute(kv, i);
        if (memcmp(kv, back, CHUNK_BYTES) != 0) {
            fprintf(stderr, "chunk %u differs\n", i);
            return 1;
        }
    }
    need(kvt_stats(cache, stats, sizeof stats, &n), "statistics");
    printf("%s\n", stats);
    need(kvt_close(cache, 10000), "close");
    return 0;
}
