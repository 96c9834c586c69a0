/* Closing while others use the library: whoever waits is woken at once, and whoever
 * works gets a code, never a crash or a wrong byte. */
#include <pthread.h>
#include <time.h>

#include "root.h"

static kvt_cache cache;
static kvt_coord coord;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static pthread_barrier_t started;

/* Waits for a group that nobody completes. */
static void *wait_for_group(void *rc)
{
    kvt_accepted accepted;
    KVT_INIT(accepted);
    pthread_barrier_wait(&started);
    *(int32_t *)rc = kvt_coord_ready(coord, 60000, &accepted);
    return NULL;
}

/* Waits for a leader that there never is. */
static void *wait_for_leader(void *rc)
{
    pthread_barrier_wait(&started);
    *(int32_t *)rc = kvt_wait_open(cache, 60000);
    return NULL;
}

static void run(const char *role, void *(*waits)(void *), int by_coord)
{
    pthread_t thread;
    int32_t rc = KVT_OK;
    double begin;
    struct timespec pause = {0, 50000000};

    cache = open_cache(role);
    if (strcmp(role, "auto") == 0)
        OK(kvt_wait_open(cache, 10000));
    OK(kvt_coordinate(cache, "incomplete", 2, &coord));
    CHECK(pthread_barrier_init(&started, NULL, 2) == 0);
    CHECK(pthread_create(&thread, NULL, waits, &rc) == 0);
    pthread_barrier_wait(&started);
    nanosleep(&pause, NULL); /* let it enter; either order is fine for what is checked */
    begin = now();
    if (by_coord)
        OK(kvt_coord_close(coord));
    else
        OK(kvt_close(cache, 10000));
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(now() - begin < 5);
    CHECK(rc == KVT_E_CLOSED || rc == KVT_E_HANDLE);
    CHECK_RC(kvt_coord_close(coord), KVT_E_HANDLE);
    if (by_coord)
        OK(kvt_close(cache, 10000));
    pthread_barrier_destroy(&started);
}

/* Many threads close many handles: each is closed once. */
#define N 64

static uint64_t all[N];
static int closed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *close_all(void *unused)
{
    (void)unused;
    for (int i = 0; i < N; i++) {
        int32_t rc = kvt_coord_close(all[i]);
        CHECK(rc == KVT_OK || rc == KVT_E_HANDLE);
        pthread_mutex_lock(&lock);
        closed += rc == KVT_OK;
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void many(void)
{
    pthread_t threads[4];
    cache = open_leader();
    for (int i = 0; i < N; i++) {
        char group[32];
        snprintf(group, sizeof group, "g%d", i);
        OK(kvt_coordinate(cache, group, 1, &all[i]));
        for (int j = 0; j < i; j++)
            CHECK(all[j] != all[i]);
    }
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, close_all, NULL) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(closed == N);
    OK(kvt_close(cache, 10000));
}

/* Closing while others put, get and ask: every call ends, with a code that says so. */

#define CHUNK 65536
static kvt_blob blob;
static kvt_key keys[16];

static int is_expected(int32_t rc)
{
    return rc == KVT_OK || rc == KVT_E_MISS || rc == KVT_E_DECLINED || rc == KVT_E_BUSY || rc == KVT_E_TIMEOUT ||
           rc == KVT_E_HANDLE || rc == KVT_E_CLOSED;
}

static void *use(void *number)
{
    uint8_t *payload = malloc(CHUNK), *back = malloc(CHUNK);
    unsigned i = (unsigned)(uintptr_t)number;
    int32_t rc = KVT_OK;
    CHECK(payload != NULL && back != NULL);
    pthread_barrier_wait(&started);
    while (rc != KVT_E_HANDLE && rc != KVT_E_CLOSED) {
        unsigned k = i++ % 16;
        memset(payload, (int)k + 1, CHUNK);
        rc = kvt_put(blob, &keys[k], NULL, 0, payload, CHUNK, 50);
        CHECK(is_expected(rc));
        rc = kvt_get(blob, &keys[k], back, CHUNK, 50);
        CHECK(is_expected(rc));
        if (rc == KVT_OK)
            CHECK(memcmp(payload, back, CHUNK) == 0);
        if (k == 3)
            (void)kvt_remove(blob, &keys[k], 1);
        rc = kvt_lookup(blob, &keys[k], 1, NULL, NULL);
        CHECK(is_expected(rc));
    }
    free(payload);
    free(back);
    return NULL;
}

static void in_use(int by_blob)
{
    static const char model[] = "{\"model\": \"m\", \"chunk_bytes\": 65536, \"chunk_tokens\": 16}";
    pthread_t threads[4];
    struct timespec pause = {0, 200000000};
    cache = open_leader();
    OK(kvt_blob_open(cache, model, sizeof model - 1, &blob));
    OK(kvt_blob_ready(blob, 10000, NULL));
    for (unsigned i = 0; i < 16; i++)
        memset(&keys[i], (int)i + 1, sizeof keys[i]);
    CHECK(pthread_barrier_init(&started, NULL, 5) == 0);
    for (unsigned i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, use, (void *)(uintptr_t)i) == 0);
    pthread_barrier_wait(&started);
    nanosleep(&pause, NULL);
    if (by_blob)
        OK(kvt_blob_close(blob));
    else
        OK(kvt_close(cache, 10000));
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    if (by_blob)
        OK(kvt_close(cache, 10000));
    pthread_barrier_destroy(&started);
}

int main(void)
{
    make_root();
    in_use(1);
    in_use(0);
    run("auto", wait_for_group, 0);
    run("auto", wait_for_group, 1);
    run("member", wait_for_leader, 0);
    many();
    return 0;
}
