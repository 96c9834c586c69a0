/* Closing wakes whoever waits: a thread in a long wait gets an answer at once. */
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

int main(void)
{
    make_root();
    run("auto", wait_for_group, 0);
    run("auto", wait_for_group, 1);
    run("member", wait_for_leader, 0);
    many();
    return 0;
}
