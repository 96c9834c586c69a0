/*
 * guard.c - what must be decided before Go is entered: whether this process may
 * use the library at all, and where a failure's sentence is kept.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shim.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

static const char forked_text[] =
    "this process was forked after kvtier was loaded, and a Go runtime does not survive that: "
    "exec, or start the child before the first use of the library";

static volatile int child_of_fork;

/* 1 here, 0 in every child: the kernel wipes the page. It catches children made
 * by a bare clone(), for which no atfork handler runs. */
static const volatile unsigned char *alive = (const unsigned char *)"\1";

/* The message hangs on a key and not on a thread-local array: Go's part of the
 * library uses the static TLS block, all TLS of one library goes there together,
 * and the room that a process has left for libraries loaded late is about 500
 * bytes. */
static pthread_key_t message_key;
static int has_message_key;

static void in_child(void)
{
    child_of_fork = 1;
}

__attribute__((constructor)) static void prepare(void)
{
    has_message_key = pthread_key_create(&message_key, free) == 0;
    pthread_atfork(NULL, NULL, in_child);

    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return;
    if (madvise(page, size, MADV_WIPEONFORK) != 0) {
        munmap(page, size);
        return;
    }
    *page = 1;
    alive = page;
}

int shim_forked(void)
{
    return child_of_fork || *alive == 0;
}

shim_error *shim_message(void)
{
    if (!has_message_key)
        return NULL;
    shim_error *message = pthread_getspecific(message_key);
    if (message == NULL) {
        message = malloc(sizeof *message);
        if (message == NULL)
            return NULL;
        message->length = 0;
        if (pthread_setspecific(message_key, message) != 0) {
            free(message);
            return NULL;
        }
    }
    return message;
}

int32_t shim_fail(int32_t code, const char *text)
{
    shim_error *message = shim_message();
    if (message != NULL) {
        size_t length = strlen(text);
        if (length > sizeof message->text)
            length = sizeof message->text;
        memcpy(message->text, text, length);
        message->length = (uint32_t)length;
    }
    return code;
}

int32_t shim_timeout(int64_t timeout_ms)
{
    if (timeout_ms < 0 || timeout_ms > 3600000)
        return shim_fail(KVT_E_ARG, "timeout must be 0 to 3,600,000 ms");
    return KVT_OK;
}

static int32_t bad_struct(const char *name, const char *what)
{
    char text[160];
    snprintf(text, sizeof text, "%s%s", name, what);
    return shim_fail(KVT_E_ARG, text);
}

static int32_t check_struct(const void *p, size_t known, const char *name, int in)
{
    uint32_t size;

    if (p == NULL)
        return bad_struct(name, " is NULL");
    memcpy(&size, p, sizeof size);
    if (size < known)
        return bad_struct(name, ": struct_size is too small, set it with KVT_INIT");
    /* No struct of this ABI comes near this bound; it is an uninitialised one. */
    if (size > 4096 || size % sizeof(void *) != 0)
        return bad_struct(name, ": struct_size is not a size of this struct, set it with KVT_INIT");
    for (size_t i = known; in && i < size; i++)
        if (((const unsigned char *)p)[i] != 0)
            return bad_struct(name, " uses fields that this library is too old for");
    return KVT_OK;
}

int32_t shim_struct_in(const void *p, size_t known, const char *name)
{
    return check_struct(p, known, name, 1);
}

int32_t shim_struct_out(const void *p, size_t known, const char *name)
{
    return check_struct(p, known, name, 0);
}

const char *kvt_strerror(int32_t code)
{
    switch (code) {
    case KVT_OK: return "ok";
    case KVT_E_ARG: return "wrong argument";
    case KVT_E_HANDLE: return "closed or invented handle";
    case KVT_E_CONFIG: return "wrong configuration";
    case KVT_E_IO: return "path cannot be used";
    case KVT_E_MISS: return "not held";
    case KVT_E_DECLINED: return "not stored";
    case KVT_E_BUSY: return "no room in a queue";
    case KVT_E_TIMEOUT: return "time is up";
    case KVT_E_PENDING: return "no answer yet";
    case KVT_E_REFUSED: return "group refused";
    case KVT_E_STALE: return "of another leader session";
    case KVT_E_NO_LEADER: return "no leader now";
    case KVT_E_BUFFER: return "buffer too small";
    case KVT_E_NOT_SUPPORTED: return "not supported";
    case KVT_E_FORKED: return "called in a forked child";
    case KVT_E_CLOSED: return "closed";
    case KVT_E_INTERNAL: return "defect of the library";
    case KVT_E_SELFTEST: return "self-test failed";
    }
    return "unknown code";
}

size_t kvt_last_error(char *buf, size_t cap)
{
    const char *text = "";
    size_t length = 0;

    if (shim_forked()) {
        text = forked_text;
        length = sizeof forked_text - 1;
    } else if (has_message_key) {
        const shim_error *message = pthread_getspecific(message_key);
        if (message != NULL) {
            text = message->text;
            length = message->length;
        }
    }
    if (buf != NULL && cap > 0) {
        size_t fits = length < cap - 1 ? length : cap - 1;
        memcpy(buf, text, fits);
        buf[fits] = '\0';
    }
    return length;
}

int32_t kvt_version(uint32_t *abi, char *text, size_t cap)
{
    SHIM_ENTER();
    if (abi != NULL)
        *abi = KVT_ABI_VERSION;
    if (text != NULL && cap > 0) {
        strncpy(text, SHIM_VERSION, cap - 1);
        text[cap - 1] = '\0';
    }
    return KVT_OK;
}
