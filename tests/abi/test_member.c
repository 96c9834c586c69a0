/* Two processes, two ranks: this program leads and holds rank 0 and the coordinator,
 * and runs itself again as rank 1, a member. What both stored under one topology is
 * then loaded under another. */
#include <signal.h>
#include <sys/wait.h>

#include "paged.h"

#define CHUNKS 4u
#define TOKENS (CHUNKS * C)
#define INTERLEAVE 4u

enum what { FILL = 1, STORE, LOAD, QUIT };

/* What the coordinator tells the ranks, in the engine's own way: here, a pipe. */
struct plan {
    uint32_t what;
    uint32_t lo, hi; /* of a load */
    uint64_t op, session;
    kvt_verdict verdicts[CHUNKS];
};

static struct pages pages;
static uint32_t table[TOKENS / B];

static void carry_out(kvt_cache cache, kvt_rank rank, const struct plan *p)
{
    uint32_t v = B * pages.d;
    if (p->what == FILL) {
        wipe_pages(&pages);
        fill_tokens(&pages, table, TOKENS);
    } else if (p->what == STORE) {
        kvt_grant grants[CHUNKS];
        kvt_store_op s;
        memset(grants, 0, sizeof grants);
        KVT_INIT(s);
        for (uint32_t i = 0; i < CHUNKS; i++) {
            grants[i].index = i;
            grants[i].slot = p->verdicts[i].slot;
            grants[i].generation = p->verdicts[i].generation;
        }
        s.op = p->op;
        s.session = p->session;
        s.grants = grants;
        s.ngrants = CHUNKS;
        s.blocks = table;
        s.nblocks = TOKENS / v;
        OK(kvt_store(rank, &s));
    } else if (p->what == LOAD) {
        kvt_load_op l;
        kvt_event e;
        wipe_pages(&pages);
        KVT_INIT(l);
        l.op = p->op;
        l.session = p->session;
        l.nchunks = (p->hi + C - 1) / C - p->lo / C;
        l.first_token = p->lo;
        l.tokens = p->hi - p->lo;
        l.blocks = &table[p->lo / v];
        l.nblocks = (p->hi + v - 1) / v - p->lo / v;
        l.verdicts = p->verdicts;
        l.nverdicts = l.nchunks;
        OK(kvt_load(rank, &l));
        e = next_event(cache);
        CHECK(e.op == p->op && e.handle == rank);
        CHECK_RC(e.status, KVT_OK);
        CHECK(e.tokens == p->hi - p->lo && e.failed_chunk == l.nchunks);
        check_tokens(&pages, table, TOKENS, p->lo, p->hi);
    }
}

/* ---- rank 1, in a process of its own ---- */

static int member(void)
{
    struct plan plan;
    kvt_cache cache = open_cache("member");
    kvt_rank rank;
    kvt_accepted a;
    int32_t state;
    char ok = 1;

    OK(kvt_wait_open(cache, 10000));
    OK(kvt_state(cache, &state, NULL, 0));
    CHECK(state == KVT_STATE_MEMBER);
    make_pages(&pages, 2, INTERLEAVE, 1);
    rank = register_pages(cache, "two", &pages);
    KVT_INIT(a);
    OK(kvt_rank_ready(rank, 10000, &a));
    CHECK(a.dcp == 2 && a.interleave == INTERLEAVE);
    while (read(STDIN_FILENO, &plan, sizeof plan) == (ssize_t)sizeof plan && plan.what != QUIT) {
        carry_out(cache, rank, &plan);
        CHECK(write(STDOUT_FILENO, &ok, 1) == 1);
    }
    OK(kvt_unregister(rank, 10000));
    OK(kvt_close(cache, 10000));
    return 0;
}

/* ---- rank 0 and coordinator ---- */

static int to_child = -1, from_child = -1;
static pid_t child;

static void start_child(const char *program)
{
    int in[2], out[2];
    CHECK(pipe(in) == 0 && pipe(out) == 0);
    fflush(NULL);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dup2(in[0], STDIN_FILENO);
        dup2(out[1], STDOUT_FILENO);
        close(in[1]);
        close(out[0]);
        execl(program, program, root_dir, (char *)NULL);
        _exit(99);
    }
    close(in[0]);
    close(out[1]);
    to_child = in[1];
    from_child = out[0];
}

/* Hands the plan to both ranks and waits until both are done. */
static void both(kvt_cache cache, kvt_rank rank, const struct plan *plan)
{
    char ok = 0;
    CHECK(write(to_child, plan, sizeof *plan) == (ssize_t)sizeof *plan);
    carry_out(cache, rank, plan);
    CHECK(read(from_child, &ok, 1) == 1 && ok == 1);
}

static kvt_key root, keys[CHUNKS];

static void make_keys(const uint8_t fingerprint[32])
{
    uint32_t tokens[TOKENS];
    size_t n;
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = 7 * i;
    OK(kvt_key_root(fingerprint, NULL, 0, &root));
    OK(kvt_keys(&root, C, tokens, TOKENS, NULL, 0, keys, CHUNKS, &n));
}

/* An arena grows behind its use: what is declined at first is tried again. */
static void begin_store(kvt_coord coord, struct plan *plan)
{
    for (int tries = 0; tries < 1000; tries++) {
        kvt_store_begin_req req;
        uint32_t granted = 0;
        struct timespec pause = {0, 5000000};

        KVT_INIT(req);
        req.op = ++plan->op;
        req.parent = root;
        req.keys = keys;
        req.n = CHUNKS;
        req.verdicts = plan->verdicts;
        OK(kvt_store_begin(coord, &req, 1, 5000, &plan->session));
        CHECK_RC(req.status, KVT_OK);
        while (granted < CHUNKS && plan->verdicts[granted].code == KVT_GRANTED)
            granted++;
        if (granted == CHUNKS)
            return;
        OK(kvt_cancel(coord, plan->op, KVT_CANCEL_UNSENT));
        nanosleep(&pause, NULL);
    }
    CHECK(!"slots are granted");
}

static void begin_load(kvt_coord coord, struct plan *plan, uint32_t lo, uint32_t hi)
{
    uint32_t first = lo / C, n = (hi + C - 1) / C - first;
    memset(plan, 0, sizeof *plan);
    plan->what = LOAD;
    plan->op = 100000 + lo;
    plan->lo = lo;
    plan->hi = hi;
    lease_all(coord, plan->op, keys, first + n);
    OK(kvt_load_begin(coord, plan->op, plan->op, first, &keys[first], n, 5000, plan->verdicts, &plan->session));
}

static void two_ranks(kvt_cache cache, const char *program)
{
    struct plan plan;
    kvt_coord coord;
    kvt_rank rank;
    kvt_accepted a;
    uint32_t lengths[][2] = {{0, TOKENS}, {21, TOKENS - 9}, {C, C + 1}};
    int status;

    start_child(program);
    OK(kvt_coordinate(cache, "two", 2, &coord));
    make_pages(&pages, 2, INTERLEAVE, 0);
    rank = register_pages(cache, "two", &pages);
    KVT_INIT(a);
    OK(kvt_coord_ready(coord, 20000, &a)); /* the child must have come, too */
    OK(kvt_rank_ready(rank, 10000, &a));
    make_keys(a.fingerprint);

    memset(&plan, 0, sizeof plan);
    plan.what = FILL;
    both(cache, rank, &plan);
    plan.what = STORE;
    begin_store(coord, &plan);
    both(cache, rank, &plan);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        begin_load(coord, &plan, lengths[i][0], lengths[i][1]);
        both(cache, rank, &plan);
    }
    plan.what = QUIT;
    CHECK(write(to_child, &plan, sizeof plan) == (ssize_t)sizeof plan);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(kvt_unregister(rank, 10000));
    OK(kvt_coord_close(coord));
    free_pages(&pages);
}

/* One rank without DCP finds what two ranks with DCP stored. */
static void one_rank(kvt_cache cache)
{
    struct plan plan;
    kvt_coord coord;
    kvt_accepted a;
    kvt_rank rank;

    OK(kvt_coordinate(cache, "one", 1, &coord));
    make_pages(&pages, 1, 1, 0);
    rank = register_pages(cache, "one", &pages);
    KVT_INIT(a);
    OK(kvt_coord_ready(coord, 10000, &a));
    OK(kvt_rank_ready(rank, 10000, &a));
    CHECK(a.dcp == 1);
    make_keys(a.fingerprint);
    begin_load(coord, &plan, 5, TOKENS - 3);
    carry_out(cache, rank, &plan);
    OK(kvt_unregister(rank, 10000));
    free_pages(&pages);
}

int main(int argc, char **argv)
{
    kvt_cache cache;

    for (uint32_t i = 0; i < TOKENS / B; i++)
        table[i] = (i * 5 + 3) % NBLOCKS;
    if (argc > 1) {
        snprintf(root_dir, sizeof root_dir, "%s", argv[1]);
        return member();
    }
    signal(SIGPIPE, SIG_IGN); /* a dead child shows in the checks */
    make_root();
    cache = open_leader();
    two_ranks(cache, argv[0]);
    one_rank(cache);
    OK(kvt_close(cache, 10000));
    return 0;
}
