/* check.h - what the C tests share: CHECK ends the program with a message. */
#ifndef CHECK_H
#define CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            char why_[2048];                                                                   \
            kvt_last_error(why_, sizeof why_);                                                 \
            fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, why_); \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

/* Checks a return code, and shows it when it is another. */
#define CHECK_RC(call, want)                                                                                     \
    do {                                                                                                         \
        int32_t rc_ = (call);                                                                                    \
        if (rc_ != (want)) {                                                                                     \
            char why_[2048];                                                                                     \
            kvt_last_error(why_, sizeof why_);                                                                   \
            fprintf(stderr, "%s:%d: %s\n  gave %d (%s), want %d\n  last error: %s\n", __FILE__, __LINE__, #call, \
                    (int)rc_, kvt_strerror(rc_), (int)(want), why_);                                             \
            exit(1);                                                                                             \
        }                                                                                                        \
    } while (0)

#define OK(call) CHECK_RC(call, KVT_OK)

/* Checks that the last failure of this thread said something about word. */
#define CHECK_SAYS(word)                                                                              \
    do {                                                                                              \
        char why_[2048];                                                                              \
        kvt_last_error(why_, sizeof why_);                                                            \
        if (strstr(why_, (word)) == NULL) {                                                           \
            fprintf(stderr, "%s:%d: \"%s\" is not in: %s\n", __FILE__, __LINE__, (word), why_); \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

#endif
