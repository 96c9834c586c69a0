/* shim.h - what the C half and the Go half of the library agree on. */
#ifndef KVTIER_SHIM_H
#define KVTIER_SHIM_H

#include "kvtier.h"

/* Equal to the version in package kvtier; the build fails otherwise. It is here
 * because kvt_version must not wait for the Go runtime. */
#define SHIM_VERSION "0.1.0"

/* The message of a thread's last failure. Go writes it through the pointer that
 * every export gets, so that a failure costs no call back into C. */
typedef struct shim_error {
    uint32_t length;
    char text[2044]; /* not NUL-terminated */
} shim_error;

/* This thread's message, or NULL when there is no memory for one. */
shim_error *shim_message(void);

/* Keeps text as this thread's message and returns code. */
int32_t shim_fail(int32_t code, const char *text);

/* True in a process that was forked after the library was loaded. */
int shim_forked(void);

/* KVT_OK, or KVT_E_ARG for a timeout outside 0..3,600,000 ms. */
int32_t shim_timeout(int64_t timeout_ms);

/* Checks a struct handed in: at least as long as in ABI 1.0, and when it is
 * longer than this library knows (a program built with a newer header), nothing
 * set in the part that would be ignored. */
int32_t shim_struct_in(const void *p, size_t known, const char *name);

/* Checks a struct to be filled: only its size matters. */
int32_t shim_struct_out(const void *p, size_t known, const char *name);

/* Ends the calling function with KVT_E_FORKED in a forked child. Comes before
 * anything else: nothing but this flag is sound there. */
#define SHIM_ENTER()             \
    do {                         \
        if (shim_forked())       \
            return KVT_E_FORKED; \
    } while (0)

/* Ends the calling function when a check fails. */
#define SHIM_CHECK(call)      \
    do {                      \
        int32_t rc_ = (call); \
        if (rc_ != KVT_OK)    \
            return rc_;       \
    } while (0)

#define SHIM_REQUIRE(condition, text)            \
    do {                                         \
        if (!(condition))                        \
            return shim_fail(KVT_E_ARG, (text)); \
    } while (0)

/* Bounds on counts: far above what is useful, far below what could overflow. */
#define SHIM_MAX_COUNT ((size_t)1 << 24)
#define SHIM_MAX_TOKENS ((size_t)1 << 30)
#define SHIM_MAX_BYTES ((size_t)1 << 40)

#endif
