/* Wrong handles, arguments, structs and settings are errors with a sentence. */
#include <sys/mman.h>

#include "root.h"

static void bad_settings(void)
{
    kvt_cache cache = 7;
    char text[16];

#define BAD(json, code) CHECK_RC(kvt_open((json), strlen(json), &cache), (code)); CHECK(cache == 0)
    BAD("{\"dram_gb\": 1}", KVT_E_CONFIG);
    CHECK_SAYS("dram_gib"); /* the nearest one */
    BAD("{\"dram_gib\": \"much\"}", KVT_E_CONFIG);
    CHECK_SAYS("dram_gib");
    BAD("{\"role\": \"king\"}", KVT_E_CONFIG);
    CHECK_SAYS("king");
    BAD("{\"dram_gib\": 1", KVT_E_CONFIG);
    BAD("[]", KVT_E_CONFIG);
    BAD("{} {}", KVT_E_CONFIG);
    BAD("\xff\xfe", KVT_E_CONFIG);
    BAD("{\"disk_path\": \"/dev/null\"}", KVT_E_IO);
    CHECK_SAYS("/dev/null");
#undef BAD
    CHECK_RC(kvt_open(NULL, 5, &cache), KVT_E_ARG);
    CHECK_RC(kvt_open("{}", 0, &cache), KVT_E_ARG);
    CHECK_RC(kvt_open("{}", 2, NULL), KVT_E_ARG);
    CHECK_RC(kvt_open("{}", SIZE_MAX, &cache), KVT_E_ARG);

    /* The message can be cut, and its length asked for. */
    CHECK(kvt_last_error(NULL, 0) > 10);
    CHECK(kvt_last_error(text, sizeof text) > sizeof text);
    CHECK(strlen(text) == sizeof text - 1);
    text[0] = 'x';
    kvt_last_error(text, 0);
    CHECK(text[0] == 'x');
}

static void bad_handles(kvt_cache cache)
{
    static const uint64_t invented[] = {0, 1, UINT64_MAX, UINT64_C(1) << 32, UINT64_C(99) << 32 | 1};
    int32_t state, fd;
    size_t n;
    uint64_t session;
    kvt_event event;
    kvt_record record;
    kvt_key key = {{0}};
    kvt_blob blob;
    kvt_accepted accepted;
    kvt_hits hits;
    kvt_store_op store;
    kvt_load_op load;
    char buf[8];
    KVT_INIT(accepted);
    KVT_INIT(hits);
    KVT_INIT(store);
    KVT_INIT(load);
    store.op = load.op = 1;

    for (size_t i = 0; i < sizeof invented / sizeof invented[0]; i++) {
        uint64_t h = invented[i];
        CHECK_RC(kvt_close(h, 0), KVT_E_HANDLE);
        CHECK_RC(kvt_state(h, &state, NULL, 0), KVT_E_HANDLE);
        CHECK_RC(kvt_wait_open(h, 0), KVT_E_HANDLE);
        CHECK_RC(kvt_poll(h, &event, 1, &n), KVT_E_HANDLE);
        CHECK_RC(kvt_eventfd(h, &fd), KVT_E_HANDLE);
        CHECK_RC(kvt_stats(h, buf, sizeof buf, &n), KVT_E_HANDLE);
        CHECK_RC(kvt_flush(h, 0), KVT_E_HANDLE);
        CHECK_RC(kvt_log_poll(h, &record, 1, &n), KVT_E_HANDLE);
        CHECK_RC(kvt_blob_open(h, "{}", 2, &blob), KVT_E_HANDLE);
        CHECK_RC(kvt_blob_close(h), KVT_E_HANDLE);
        CHECK_RC(kvt_blob_ready(h, 0, NULL), KVT_E_HANDLE);
        CHECK_RC(kvt_put(h, &key, NULL, 0, buf, sizeof buf, 0), KVT_E_HANDLE);
        CHECK_RC(kvt_get(h, &key, buf, sizeof buf, 0), KVT_E_HANDLE);
        CHECK_RC(kvt_lookup(h, &key, 1, NULL, NULL), KVT_E_HANDLE);
        CHECK_RC(kvt_remove(h, &key, 1), KVT_E_HANDLE);
        CHECK_RC(kvt_coordinate(h, "g", 1, &session), KVT_E_HANDLE);
        CHECK_RC(kvt_coord_close(h), KVT_E_HANDLE);
        CHECK_RC(kvt_coord_ready(h, 0, &accepted), KVT_E_HANDLE);
        CHECK_RC(kvt_coord_session(h, &session), KVT_E_HANDLE);
        CHECK_RC(kvt_lease(h, 1, &key, 1, 0), KVT_E_HANDLE);
        CHECK_RC(kvt_lease_result(h, 1, 0, 0, &hits), KVT_E_HANDLE);
        CHECK_RC(kvt_release(h, 1), KVT_E_HANDLE);
        CHECK_RC(kvt_renew(h, NULL, 0), KVT_E_HANDLE);
        CHECK_RC(kvt_store_begin(h, NULL, 0, 0, &session), KVT_E_HANDLE);
        CHECK_RC(kvt_cancel(h, 1, 0), KVT_E_HANDLE);
        CHECK_RC(kvt_unregister(h, 0), KVT_E_HANDLE);
        CHECK_RC(kvt_rank_ready(h, 0, &accepted), KVT_E_HANDLE);
        CHECK_RC(kvt_store(h, &store), KVT_E_HANDLE);
        CHECK_RC(kvt_load(h, &load), KVT_E_HANDLE);
        CHECK_RC(kvt_load_cancel(h, 1), KVT_E_HANDLE);
        CHECK_RC(kvt_fence(h, NULL, 0, 0), KVT_E_HANDLE);
        CHECK_RC(kvt_selftest(h, KVT_SELFTEST_PAGES, 10), KVT_E_HANDLE);
        CHECK_RC(kvt_selftest(h, 2, 10), KVT_E_ARG);
        CHECK_RC(kvt_selftest(h, 0, 60001), KVT_E_ARG);
    }
    /* A handle of another kind. */
    CHECK_RC(kvt_blob_close(cache), KVT_E_HANDLE);
    CHECK_RC(kvt_unregister(cache, 0), KVT_E_HANDLE);
    OK(kvt_state(cache, &state, NULL, 0));
}

static void bad_arguments(kvt_cache cache)
{
    static const char model[] = "{\"model\": \"m\", \"chunk_bytes\": 4096, \"chunk_tokens\": 16}";
    kvt_blob blob = 0;
    kvt_coord coord = 0;
    kvt_rank rank = 0;
    kvt_region region;
    kvt_accepted accepted;
    struct {
        kvt_accepted known;
        uint64_t newer;
    } big;
    struct {
        kvt_store_op known;
        uint64_t newer;
    } newer_op;
    size_t n = 0;
    int32_t fd = -1;

    CHECK_RC(kvt_wait_open(cache, -1), KVT_E_ARG);
    CHECK_RC(kvt_wait_open(cache, 3600001), KVT_E_ARG);
    CHECK_SAYS("timeout");
    CHECK_RC(kvt_close(cache, -1), KVT_E_ARG); /* and it stays open */
    CHECK_RC(kvt_state(cache, NULL, NULL, 0), KVT_E_ARG);
    CHECK_RC(kvt_poll(cache, NULL, 1, &n), KVT_E_ARG);
    CHECK_RC(kvt_stats(cache, NULL, 10, &n), KVT_E_ARG);
    CHECK_RC(kvt_stats(cache, NULL, 0, &n), KVT_E_BUFFER);
    OK(kvt_poll(cache, NULL, 0, &n));
    OK(kvt_eventfd(cache, &fd));
    CHECK(fd >= 0);

    CHECK_RC(kvt_blob_open(cache, "{\"modle\": 1}", 12, &blob), KVT_E_CONFIG);
    CHECK_SAYS("the nearest one is");
    CHECK_RC(kvt_blob_open(cache, "{\"model\": \"m\"}", 14, &blob), KVT_E_ARG);
    OK(kvt_blob_open(cache, model, sizeof model - 1, &blob));
    CHECK_RC(kvt_put(blob, NULL, NULL, 0, model, 4096, 0), KVT_E_ARG);
    CHECK_RC(kvt_remove(blob, NULL, 3), KVT_E_ARG);
    OK(kvt_blob_close(blob));

    CHECK_RC(kvt_coordinate(cache, "", 1, &coord), KVT_E_ARG);
    CHECK_RC(kvt_coordinate(cache, NULL, 1, &coord), KVT_E_ARG);
    CHECK_RC(kvt_coordinate(cache, "g", 0, &coord), KVT_E_ARG);
    CHECK_RC(kvt_coordinate(cache, "g", 65, &coord), KVT_E_ARG);
    OK(kvt_coordinate(cache, "g", 1, &coord));

    /* Sizes of structs. */
    memset(&accepted, 0, sizeof accepted);
    CHECK_RC(kvt_coord_ready(coord, 0, &accepted), KVT_E_ARG);
    CHECK_SAYS("struct_size");
    CHECK_RC(kvt_coord_ready(coord, 0, NULL), KVT_E_ARG);
    accepted.struct_size = sizeof accepted - 8;
    CHECK_RC(kvt_coord_ready(coord, 0, &accepted), KVT_E_ARG);
    memset(&accepted, 0xff, sizeof accepted);
    CHECK_RC(kvt_coord_ready(coord, 0, &accepted), KVT_E_ARG);
    memset(&big, 0, sizeof big);
    big.known.struct_size = sizeof big;
    CHECK_RC(kvt_coord_ready(coord, 0, &big.known), KVT_E_TIMEOUT); /* of a newer header */
    OK(kvt_coord_close(coord));

    memset(&newer_op, 0, sizeof newer_op);
    newer_op.known.struct_size = sizeof newer_op;
    newer_op.known.op = 1;
    CHECK_RC(kvt_store(0, &newer_op.known), KVT_E_HANDLE);
    newer_op.newer = 1;
    CHECK_RC(kvt_store(0, &newer_op.known), KVT_E_ARG);
    CHECK_SAYS("too old");

    KVT_INIT(region);
    CHECK_RC(kvt_register(cache, "{}", 2, &region, 1, &rank), KVT_E_ARG);
    CHECK_SAYS("base");
    region.base = &region;
    memset(region.name, 'x', sizeof region.name);
    CHECK_RC(kvt_register(cache, "{}", 2, &region, 1, &rank), KVT_E_ARG);
    CHECK_SAYS("name");
    region.name[4] = '\0';
    CHECK_RC(kvt_register(cache, "{\"grup\": 1}", 11, &region, 1, &rank), KVT_E_CONFIG);
    CHECK_RC(kvt_register(cache, "{}", 2, &region, 1, &rank), KVT_E_ARG);
    CHECK_RC(kvt_register(cache, "{}", 2, &region, 0, &rank), KVT_E_ARG);

    CHECK_RC(kvt_begin(rank, KVT_DIR_STORE, 1, NULL, 0, &n), KVT_E_NOT_SUPPORTED);
    CHECK_RC(kvt_commit(rank, 1, NULL, 0), KVT_E_NOT_SUPPORTED);
}

/* Memory that is not there is an error, not the end of the process. (Where nobody
 * has replaced Go's fault handler: it is the second line of defence.) */
static void bad_memory(kvt_cache cache)
{
    static const char model[] = "{\"model\": \"m\", \"chunk_bytes\": 4096, \"chunk_tokens\": 16}";
    uint8_t fingerprint[32];
    char good[4096];
    kvt_blob blob = 0;
    kvt_key root, key;
    size_t n;
    uint32_t tokens[16] = {0};
    void *hole = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK(hole != MAP_FAILED);
    memset(good, 7, sizeof good);
    OK(kvt_blob_open(cache, model, sizeof model - 1, &blob));
    OK(kvt_blob_ready(blob, 10000, fingerprint));
    OK(kvt_key_root(fingerprint, NULL, 0, &root));
    CHECK_RC(kvt_keys(&root, 16, hole, 16, NULL, 0, &key, 1, &n), KVT_E_INTERNAL);
    CHECK_SAYS("fault");
    OK(kvt_keys(&root, 16, tokens, 16, NULL, 0, &key, 1, &n));
    OK(kvt_put(blob, &key, NULL, 0, good, sizeof good, 5000));
    CHECK_RC(kvt_get(blob, &key, hole, sizeof good, 5000), KVT_E_INTERNAL);
    memset(good, 0, sizeof good);
    OK(kvt_get(blob, &key, good, sizeof good, 5000));
    CHECK(good[0] == 7 && good[4095] == 7);
    OK(kvt_remove(blob, &key, 1));
    CHECK_RC(kvt_put(blob, &key, NULL, 0, hole, sizeof good, 1000), KVT_E_INTERNAL);
    OK(kvt_blob_close(blob));
    munmap(hole, 4096);
}

int main(void)
{
    kvt_cache cache;
    make_root();
    bad_settings();
    cache = open_leader();
    bad_handles(cache);
    bad_arguments(cache);
    bad_memory(cache);
    OK(kvt_close(cache, 10000));
    return 0;
}
