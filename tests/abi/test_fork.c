/* Children of fork(): one that calls is told so at once, one that does not call ends
 * as if nothing was there, one that execs may do what it wants; the parent goes on. */
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "root.h"

static kvt_cache cache;
static kvt_blob blob;

/* Waits at most 5 s for a child, and gives its status. A child that hangs is the
 * failure that this is about. */
static int finish(pid_t child)
{
    int status = 0;
    for (int i = 0; i < 500; i++) {
        struct timespec pause = {0, 10000000};
        pid_t got = waitpid(child, &status, WNOHANG);
        CHECK(got >= 0);
        if (got == child)
            return status;
        nanosleep(&pause, NULL);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    fprintf(stderr, "a forked child hangs\n");
    exit(1);
}

static void calls(void)
{
    char text[256];
    kvt_cache other;
    kvt_key key = {{0}};
    kvt_accepted accepted;
    uint32_t abi;
    size_t n;
    KVT_INIT(accepted);
    if (kvt_open("{}", 2, &other) != KVT_E_FORKED || kvt_close(cache, 10000) != KVT_E_FORKED ||
        kvt_wait_open(cache, 10000) != KVT_E_FORKED || kvt_get(blob, &key, text, sizeof text, 1000) != KVT_E_FORKED ||
        kvt_key_root((const uint8_t *)text, NULL, 0, &key) != KVT_E_FORKED ||
        kvt_stats(cache, text, sizeof text, &n) != KVT_E_FORKED ||
        kvt_coord_ready(0, 1000, &accepted) != KVT_E_FORKED || kvt_store(0, NULL) != KVT_E_FORKED ||
        kvt_version(&abi, NULL, 0) != KVT_E_FORKED || kvt_close(0, -5) != KVT_E_FORKED)
        _exit(10);
    if (strlen(kvt_strerror(KVT_E_FORKED)) == 0)
        _exit(11);
    kvt_last_error(text, sizeof text);
    if (strstr(text, "fork") == NULL)
        _exit(12);
    exit(0); /* handlers and destructors run, too */
}

/* Like fork, but no handler of pthread_atfork hears of it. */
static pid_t bare_clone(void)
{
    return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}

static void child_of(pid_t (*make)(void), void (*run)(void), const char *what)
{
    fflush(NULL);
    pid_t pid = make();
    CHECK(pid >= 0);
    if (pid == 0) {
        run();
        exit(0);
    }
    int status = finish(pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fprintf(stderr, "child that %s: status 0x%x\n", what, (unsigned)status);
        exit(1);
    }
}

static void child(void (*run)(void), const char *what)
{
    child_of(fork, run, what);
}

static void nothing(void) {}

static void grandchild(void)
{
    pid_t pid = fork();
    if (pid == 0)
        calls();
    if (pid < 0)
        _exit(20);
    exit(WEXITSTATUS(finish(pid)));
}

static const char *program;

static void execs(void)
{
    execl(program, program, "again", (char *)NULL);
    _exit(30);
}

/* What the program that was exec'ed does: uses the library as if it were the first. */
static void again(void)
{
    make_root();
    cache = open_leader();
    OK(kvt_close(cache, 10000));
}

int main(int argc, char **argv)
{
    static const char model[] = "{\"model\": \"m\", \"chunk_bytes\": 256, \"chunk_tokens\": 16}";
    int32_t state;

    program = argv[0];
    if (argc > 1) {
        again();
        return 0;
    }
    make_root();
    cache = open_leader();
    OK(kvt_blob_open(cache, model, sizeof model - 1, &blob));
    OK(kvt_blob_ready(blob, 10000, NULL));
    for (int i = 0; i < 5; i++) {
        child(calls, "calls");
        child(nothing, "does nothing");
    }
    child_of(bare_clone, calls, "calls after a bare clone");
    child(grandchild, "forks again");
    child(execs, "execs");
    OK(kvt_state(cache, &state, NULL, 0));
    CHECK(state == KVT_STATE_LEADER);
    OK(kvt_close(cache, 10000));
    return 0;
}
