/*
 * shim.c - the public functions of levels 0, 1, 2 and 6 and the completions.
 *
 * Every public function does the same three things: refuse in a forked child,
 * check what can be checked without state, call its Go half. Go is never entered
 * with a pointer or a length that has not been looked at.
 */
#define _GNU_SOURCE
#include "_cgo_export.h"
#include "shim.h"

/* ---- level 0 ---- */

int32_t kvt_open(const char *json, size_t len, kvt_cache *out)
{
    SHIM_ENTER();
    SHIM_REQUIRE(out != NULL, "out is NULL");
    *out = 0;
    SHIM_REQUIRE(json != NULL && len > 0 && len <= (1u << 20), "settings must be 1 byte to 1 MiB of JSON");
    return go_kvt_open((void *)json, len, out, shim_message());
}

int32_t kvt_close(kvt_cache cache, int64_t timeout_ms)
{
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    return go_kvt_close(cache, timeout_ms, shim_message());
}

int32_t kvt_state(kvt_cache cache, int32_t *state, char *detail, size_t cap)
{
    SHIM_ENTER();
    SHIM_REQUIRE(state != NULL, "state is NULL");
    SHIM_REQUIRE(detail != NULL || cap == 0, "detail is NULL but has a size");
    SHIM_REQUIRE(cap <= SHIM_MAX_BYTES, "cap is not a size");
    return go_kvt_state(cache, state, detail, cap, shim_message());
}

int32_t kvt_wait_open(kvt_cache cache, int64_t timeout_ms)
{
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    return go_kvt_wait_open(cache, timeout_ms, shim_message());
}

/* ---- level 1 ---- */

static int32_t check_extras(const kvt_extra *extras, size_t n)
{
    SHIM_REQUIRE(extras != NULL || n == 0, "extras is NULL");
    SHIM_REQUIRE(n <= SHIM_MAX_COUNT, "too many extras");
    for (size_t i = 0; i < n; i++)
        SHIM_REQUIRE(extras[i].length <= sizeof extras[i].bytes, "an extra is longer than 32 bytes");
    return KVT_OK;
}

int32_t kvt_key_root(const uint8_t fingerprint[32], const kvt_extra *extras, size_t n, kvt_key *out)
{
    SHIM_ENTER();
    SHIM_REQUIRE(fingerprint != NULL, "fingerprint is NULL");
    SHIM_REQUIRE(out != NULL, "out is NULL");
    SHIM_CHECK(check_extras(extras, n));
    return go_kvt_key_root((void *)fingerprint, (void *)extras, n, out, shim_message());
}

int32_t kvt_keys(const kvt_key *parent, uint32_t chunk_tokens, const uint32_t *tokens, size_t ntokens,
                 const kvt_extra *extras, size_t nextras, kvt_key *out, size_t cap, size_t *n)
{
    SHIM_ENTER();
    SHIM_REQUIRE(n != NULL, "n is NULL");
    *n = 0;
    SHIM_REQUIRE(parent != NULL, "parent is NULL");
    SHIM_REQUIRE(chunk_tokens > 0 && chunk_tokens <= (1u << 20), "chunk_tokens must be 1 to 1,048,576");
    SHIM_REQUIRE(tokens != NULL || ntokens == 0, "tokens is NULL");
    SHIM_REQUIRE(ntokens <= SHIM_MAX_TOKENS, "too many tokens");
    SHIM_REQUIRE(out != NULL || cap == 0, "out is NULL but has a size");
    SHIM_CHECK(check_extras(extras, nextras));
    if (ntokens / chunk_tokens > cap) {
        *n = ntokens / chunk_tokens;
        return shim_fail(KVT_E_BUFFER, "out has room for fewer keys than there are full chunks");
    }
    return go_kvt_keys((void *)parent, chunk_tokens, (void *)tokens, ntokens, (void *)extras, nextras, out, n,
                       shim_message());
}

/* ---- level 2 ---- */

int32_t kvt_blob_open(kvt_cache cache, const char *json, size_t len, kvt_blob *out)
{
    SHIM_ENTER();
    SHIM_REQUIRE(out != NULL, "out is NULL");
    *out = 0;
    SHIM_REQUIRE(json != NULL && len > 0 && len <= (1u << 20), "settings must be 1 byte to 1 MiB of JSON");
    return go_kvt_blob_open(cache, (void *)json, len, out, shim_message());
}

int32_t kvt_blob_close(kvt_blob blob)
{
    SHIM_ENTER();
    return go_kvt_blob_close(blob, shim_message());
}

int32_t kvt_blob_ready(kvt_blob blob, int64_t timeout_ms, uint8_t fingerprint[32])
{
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    return go_kvt_blob_ready(blob, timeout_ms, fingerprint, shim_message());
}

int32_t kvt_put(kvt_blob blob, const kvt_key *key, const kvt_key *parent, uint32_t ordinal, const void *payload,
                size_t bytes, int64_t timeout_ms)
{
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    SHIM_REQUIRE(key != NULL, "key is NULL");
    SHIM_REQUIRE(payload != NULL && bytes > 0 && bytes <= SHIM_MAX_BYTES, "payload is empty or NULL");
    SHIM_REQUIRE(parent != NULL || ordinal == 0, "parent is NULL but the chunk is not the first");
    return go_kvt_put(blob, (void *)key, (void *)parent, ordinal, (void *)payload, bytes, timeout_ms, shim_message());
}

int32_t kvt_get(kvt_blob blob, const kvt_key *key, void *buf, size_t bytes, int64_t timeout_ms)
{
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    SHIM_REQUIRE(key != NULL, "key is NULL");
    SHIM_REQUIRE(buf != NULL && bytes > 0 && bytes <= SHIM_MAX_BYTES, "buf is empty or NULL");
    return go_kvt_get(blob, (void *)key, buf, bytes, timeout_ms, shim_message());
}

int32_t kvt_lookup(kvt_blob blob, const kvt_key *keys, size_t n, uint32_t *held, uint32_t *resident)
{
    SHIM_ENTER();
    SHIM_REQUIRE(keys != NULL || n == 0, "keys is NULL");
    SHIM_REQUIRE(n <= SHIM_MAX_COUNT, "too many keys");
    return go_kvt_lookup(blob, (void *)keys, n, held, resident, shim_message());
}

int32_t kvt_remove(kvt_blob blob, const kvt_key *keys, size_t n)
{
    SHIM_ENTER();
    SHIM_REQUIRE(keys != NULL || n == 0, "keys is NULL");
    SHIM_REQUIRE(n <= SHIM_MAX_COUNT, "too many keys");
    return go_kvt_remove(blob, (void *)keys, n, shim_message());
}

/* ---- completions ---- */

int32_t kvt_poll(kvt_cache cache, kvt_event *events, size_t cap, size_t *n)
{
    SHIM_ENTER();
    SHIM_REQUIRE(n != NULL, "n is NULL");
    *n = 0;
    SHIM_REQUIRE(events != NULL || cap == 0, "events is NULL but has a size");
    SHIM_REQUIRE(cap <= SHIM_MAX_COUNT, "cap is not a size");
    return go_kvt_poll(cache, events, cap, n, shim_message());
}

int32_t kvt_eventfd(kvt_cache cache, int32_t *fd)
{
    SHIM_ENTER();
    SHIM_REQUIRE(fd != NULL, "fd is NULL");
    *fd = -1;
    return go_kvt_eventfd(cache, fd, shim_message());
}

/* ---- level 6 ---- */

int32_t kvt_stats(kvt_cache cache, char *buf, size_t cap, size_t *need)
{
    SHIM_ENTER();
    SHIM_REQUIRE(need != NULL, "need is NULL");
    *need = 0;
    SHIM_REQUIRE(buf != NULL || cap == 0, "buf is NULL but has a size");
    SHIM_REQUIRE(cap <= SHIM_MAX_BYTES, "cap is not a size");
    return go_kvt_stats(cache, buf, cap, need, shim_message());
}

int32_t kvt_flush(kvt_cache cache, int64_t timeout_ms)
{
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    return go_kvt_flush(cache, timeout_ms, shim_message());
}

int32_t kvt_log_poll(kvt_cache cache, kvt_record *records, size_t cap, size_t *n)
{
    SHIM_ENTER();
    SHIM_REQUIRE(n != NULL, "n is NULL");
    *n = 0;
    SHIM_REQUIRE(records != NULL || cap == 0, "records is NULL but has a size");
    SHIM_REQUIRE(cap <= SHIM_MAX_COUNT, "cap is not a size");
    return go_kvt_log_poll(cache, records, cap, n, shim_message());
}
