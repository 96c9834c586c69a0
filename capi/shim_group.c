/*
 * shim_group.c - the public functions of levels 3, 4 and 5: what the coordinator
 * and the ranks of a group call. See shim.c for what each function does here.
 */
#define _GNU_SOURCE
#include <string.h>

#include "_cgo_export.h"
#include "shim.h"

/* ---- coordinator ---- */

int32_t kvt_coordinate(kvt_cache cache, const char *group, uint32_t ranks, kvt_coord *out)
{
    SHIM_ENTER();
    SHIM_REQUIRE(out != NULL, "out is NULL");
    *out = 0;
    SHIM_REQUIRE(group != NULL, "group is NULL");
    size_t length = strnlen(group, 256);
    SHIM_REQUIRE(length > 0 && length <= 255, "group must be 1 to 255 bytes");
    SHIM_REQUIRE(ranks >= 1 && ranks <= 64, "ranks must be 1 to 64");
    return go_kvt_coordinate(cache, (void *)group, length, ranks, out, shim_message());
}

int32_t kvt_coord_close(kvt_coord coord)
{
    SHIM_ENTER();
    return go_kvt_coord_close(coord, shim_message());
}

/* Fills what the caller's struct has room for. */
static void copy_out(void *out, const void *filled, size_t known)
{
    uint32_t size;
    memcpy(&size, out, sizeof size);
    memcpy((char *)out + sizeof size, (const char *)filled + sizeof size, known - sizeof size);
}

int32_t kvt_coord_ready(kvt_coord coord, int64_t timeout_ms, kvt_accepted *out)
{
    kvt_accepted accepted = {0};
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    SHIM_CHECK(shim_struct_out(out, sizeof accepted, "kvt_accepted"));
    SHIM_CHECK(go_kvt_coord_ready(coord, timeout_ms, &accepted, shim_message()));
    copy_out(out, &accepted, sizeof accepted);
    return KVT_OK;
}

int32_t kvt_coord_session(kvt_coord coord, uint64_t *session)
{
    SHIM_ENTER();
    SHIM_REQUIRE(session != NULL, "session is NULL");
    *session = 0;
    return go_kvt_coord_session(coord, session, shim_message());
}

int32_t kvt_lease(kvt_coord coord, uint64_t lease, const kvt_key *keys, size_t n, uint32_t flags)
{
    SHIM_ENTER();
    SHIM_REQUIRE(lease != 0, "lease id is 0");
    SHIM_REQUIRE(keys != NULL && n > 0 && n <= SHIM_MAX_COUNT, "keys is empty or NULL");
    SHIM_REQUIRE((flags & ~(KVT_LEASE_PREFETCH | KVT_LEASE_PIN)) == 0, "flags has unknown bits");
    return go_kvt_lease(coord, lease, (void *)keys, n, flags, shim_message());
}

int32_t kvt_lease_result(kvt_coord coord, uint64_t lease, uint32_t after, int64_t timeout_ms, kvt_hits *out)
{
    kvt_hits hits = {0};
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    SHIM_CHECK(shim_struct_out(out, sizeof hits, "kvt_hits"));
    int32_t rc = go_kvt_lease_result(coord, lease, after, timeout_ms, &hits, shim_message());
    if (rc == KVT_OK || rc == KVT_E_PENDING)
        copy_out(out, &hits, sizeof hits);
    return rc;
}

int32_t kvt_release(kvt_coord coord, uint64_t lease)
{
    SHIM_ENTER();
    return go_kvt_release(coord, lease, shim_message());
}

int32_t kvt_renew(kvt_coord coord, const uint64_t *leases, size_t n)
{
    SHIM_ENTER();
    SHIM_REQUIRE(leases != NULL || n == 0, "leases is NULL");
    SHIM_REQUIRE(n <= SHIM_MAX_COUNT, "too many leases");
    return go_kvt_renew(coord, (void *)leases, n, shim_message());
}

/* An array of structs that may grow is walked by the caller's size of them. */
static int32_t check_array(const void *first, size_t n, size_t known, const char *name, size_t *stride)
{
    uint32_t size = 0;
    *stride = known;
    for (size_t i = 0; i < n; i++) {
        const char *element = (const char *)first + i * *stride;
        SHIM_CHECK(shim_struct_in(element, known, name));
        memcpy(&size, element, sizeof size);
        if (i == 0)
            *stride = size;
        SHIM_REQUIRE(size == *stride, "struct_size differs within one array");
    }
    return KVT_OK;
}

int32_t kvt_store_begin(kvt_coord coord, kvt_store_begin_req *reqs, size_t n, int64_t timeout_ms, uint64_t *session)
{
    size_t stride;
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    SHIM_REQUIRE(session != NULL, "session is NULL");
    *session = 0;
    SHIM_REQUIRE(reqs != NULL || n == 0, "reqs is NULL");
    SHIM_REQUIRE(n <= SHIM_MAX_COUNT, "too many requests");
    SHIM_CHECK(check_array(reqs, n, sizeof *reqs, "kvt_store_begin_req", &stride));
    for (size_t i = 0; i < n; i++) {
        const kvt_store_begin_req *r = (const void *)((const char *)reqs + i * stride);
        SHIM_REQUIRE(r->op != 0, "op is 0");
        SHIM_REQUIRE(r->keys != NULL && r->n > 0 && r->n <= 8189, "a request needs 1 to 8,189 keys");
        SHIM_REQUIRE(r->verdicts != NULL, "verdicts is NULL");
        SHIM_REQUIRE((r->flags & ~KVT_STORE_NO_DISK) == 0, "flags has unknown bits");
    }
    return go_kvt_store_begin(coord, reqs, n, stride, timeout_ms, session, shim_message());
}

int32_t kvt_load_begin(kvt_coord coord, uint64_t op, uint64_t lease, uint32_t first_ordinal, const kvt_key *keys,
                       size_t n, int64_t timeout_ms, kvt_verdict *verdicts, uint64_t *session)
{
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    SHIM_REQUIRE(session != NULL, "session is NULL");
    *session = 0;
    SHIM_REQUIRE(op != 0, "op is 0");
    SHIM_REQUIRE(keys != NULL && n > 0 && n <= 8189, "a load needs 1 to 8,189 keys");
    SHIM_REQUIRE(verdicts != NULL, "verdicts is NULL");
    return go_kvt_load_begin(coord, op, lease, first_ordinal, (void *)keys, n, timeout_ms, verdicts, session,
                             shim_message());
}

int32_t kvt_cancel(kvt_coord coord, uint64_t op, uint32_t flags)
{
    SHIM_ENTER();
    SHIM_REQUIRE((flags & ~KVT_CANCEL_UNSENT) == 0, "flags has unknown bits");
    return go_kvt_cancel(coord, op, flags, shim_message());
}

int32_t kvt_reset(kvt_coord coord, uint8_t epoch[16])
{
    SHIM_ENTER();
    SHIM_REQUIRE(epoch != NULL, "epoch is NULL");
    return go_kvt_reset(coord, epoch, shim_message());
}

/* ---- ranks ---- */

int32_t kvt_register(kvt_cache cache, const char *json, size_t len, const kvt_region *regions, size_t n, kvt_rank *out)
{
    size_t stride;
    SHIM_ENTER();
    SHIM_REQUIRE(out != NULL, "out is NULL");
    *out = 0;
    SHIM_REQUIRE(json != NULL && len > 0 && len <= (1u << 20), "description must be 1 byte to 1 MiB of JSON");
    SHIM_REQUIRE(regions != NULL && n > 0 && n <= (1u << 16), "regions must be 1 to 65,536");
    SHIM_CHECK(check_array(regions, n, sizeof *regions, "kvt_region", &stride));
    for (size_t i = 0; i < n; i++) {
        const kvt_region *r = (const void *)((const char *)regions + i * stride);
        SHIM_REQUIRE(r->base != NULL, "a region has no base address");
        SHIM_REQUIRE(memchr(r->name, 0, sizeof r->name) != NULL, "a region's name does not end in NUL");
        SHIM_REQUIRE(memchr(r->component, 0, sizeof r->component) != NULL, "a region's component does not end in NUL");
        SHIM_REQUIRE((r->flags & ~(KVT_REGION_REPLICATED | KVT_REGION_ALL_ROWS)) == 0, "flags has unknown bits");
    }
    return go_kvt_register(cache, (void *)json, len, (void *)regions, n, stride, out, shim_message());
}

int32_t kvt_unregister(kvt_rank rank, int64_t timeout_ms)
{
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    return go_kvt_unregister(rank, timeout_ms, shim_message());
}

int32_t kvt_rank_ready(kvt_rank rank, int64_t timeout_ms, kvt_accepted *out)
{
    kvt_accepted accepted = {0};
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    SHIM_CHECK(shim_struct_out(out, sizeof accepted, "kvt_accepted"));
    SHIM_CHECK(go_kvt_rank_ready(rank, timeout_ms, &accepted, shim_message()));
    copy_out(out, &accepted, sizeof accepted);
    return KVT_OK;
}

int32_t kvt_selftest(kvt_rank rank, uint32_t flags, uint32_t timeout_ms)
{
    SHIM_ENTER();
    SHIM_REQUIRE((flags & ~KVT_SELFTEST_PAGES) == 0, "flags has unknown bits");
    SHIM_REQUIRE(timeout_ms <= 60000, "timeout_ms must be at most 60,000");
    return go_kvt_selftest(rank, flags, timeout_ms, shim_message());
}

int32_t kvt_store(kvt_rank rank, const kvt_store_op *op)
{
    SHIM_ENTER();
    SHIM_CHECK(shim_struct_in(op, sizeof *op, "kvt_store_op"));
    SHIM_REQUIRE(op->op != 0, "op is 0");
    SHIM_REQUIRE(op->grants != NULL || op->ngrants == 0, "grants is NULL");
    SHIM_REQUIRE(op->blocks != NULL || op->nblocks == 0, "blocks is NULL");
    SHIM_REQUIRE(op->ngrants <= SHIM_MAX_COUNT && op->nblocks <= SHIM_MAX_COUNT, "too many grants or blocks");
    return go_kvt_store(rank, (void *)op, shim_message());
}

/* What can be told of a load's arguments without its rank. */
static int32_t check_load(const kvt_load_op *op)
{
    SHIM_REQUIRE(op->blocks != NULL || op->nblocks == 0, "blocks is NULL");
    SHIM_REQUIRE(op->verdicts != NULL || op->nverdicts == 0, "verdicts is NULL");
    SHIM_REQUIRE(op->nverdicts <= op->nchunks, "more verdicts than chunks");
    SHIM_REQUIRE(op->nblocks <= SHIM_MAX_COUNT && op->nchunks <= SHIM_MAX_COUNT, "too many blocks or chunks");
    return KVT_OK;
}

int32_t kvt_load(kvt_rank rank, const kvt_load_op *op)
{
    SHIM_ENTER();
    SHIM_CHECK(shim_struct_in(op, sizeof *op, "kvt_load_op"));
    SHIM_REQUIRE(op->op != 0, "op is 0");
    int32_t rc = check_load(op);
    if (rc != KVT_OK) {
        go_kvt_end_load(rank, op->session, op->op);
        return rc;
    }
    return go_kvt_load(rank, (void *)op, shim_message());
}

int32_t kvt_load_cancel(kvt_rank rank, uint64_t op)
{
    SHIM_ENTER();
    return go_kvt_load_cancel(rank, op, shim_message());
}

int32_t kvt_fence(kvt_rank rank, const uint32_t *blocks, size_t n, int64_t timeout_ms)
{
    SHIM_ENTER();
    SHIM_CHECK(shim_timeout(timeout_ms));
    SHIM_REQUIRE(blocks != NULL || n == 0, "blocks is NULL");
    return go_kvt_fence(rank, shim_message());
}

/* ---- level 5 ---- */

int32_t kvt_begin(kvt_rank rank, uint32_t direction, uint64_t op, kvt_view *views, size_t cap, size_t *n)
{
    SHIM_ENTER();
    (void)rank, (void)direction, (void)op, (void)views, (void)cap;
    SHIM_REQUIRE(n != NULL, "n is NULL");
    *n = 0;
    return shim_fail(KVT_E_NOT_SUPPORTED, "views are not supported yet, use kvt_store and kvt_load");
}

int32_t kvt_commit(kvt_rank rank, uint64_t op, const uint8_t *ok, size_t n)
{
    SHIM_ENTER();
    (void)rank, (void)op, (void)ok, (void)n;
    return shim_fail(KVT_E_NOT_SUPPORTED, "views are not supported yet, use kvt_store and kvt_load");
}
