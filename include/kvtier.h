/*
 * kvtier.h - a KV-cache tier for LLM inference engines.
 *
 * kvtier keeps KV cache in host DRAM and on local disk, gives it back bit for
 * bit, and keeps the disk part over a restart. This header is the whole
 * contract of libkvtier.so: it needs C99 or C++17 and nothing else.
 *
 * Words. A *chunk* is C consecutive tokens of one prefix; its *key* is a hash
 * over everything before and in it; its *ordinal* is its place in the prefix.
 * A *slot* is a place in the DRAM arena for one chunk; (slot, generation) names
 * one use of it. A *rank* is a process that owns pages of KV cache; the
 * *coordinator* of a group of ranks is the process that plans for them (the
 * scheduler). A *lease* is the promise that a run of chunks stays retrievable.
 *
 * Levels, from simple to involved; an engine uses the ones it needs:
 *   1 keys               kvt_key_root, kvt_keys
 *   2 whole chunks       kvt_blob_open, kvt_put, kvt_get, kvt_lookup, kvt_remove
 *   3 leases             kvt_lease, kvt_lease_result, kvt_release, kvt_renew
 *   4 paged store, load  kvt_register, kvt_store_begin, kvt_store, kvt_load_begin, kvt_load, kvt_poll
 *   5 views              kvt_begin, kvt_commit (for engines that copy themselves)
 *   6 maintenance        kvt_stats, kvt_flush, kvt_reset, kvt_log_poll
 *
 * Conventions.
 *   - Every function that can fail returns int32_t: KVT_OK (0) or a negative
 *     KVT_E_* code. kvt_strerror names a code; kvt_last_error gives the sentence
 *     that belongs to the last failure on the calling thread.
 *   - Handles are plain integers that are checked on every call: a closed or
 *     invented handle is KVT_E_HANDLE, never a crash. 0 is never a handle.
 *   - Structs that may grow begin with struct_size; set it by KVT_INIT(x). In an
 *     array of them every element has it. Reserved fields are 0.
 *   - Memory handed in belongs to the caller and is read or written only during
 *     the call, except pages given to kvt_register, which must stay mapped until
 *     kvt_unregister has returned.
 *   - Times are relative, in milliseconds. There is no "for ever": the longest
 *     wait is one hour, and a negative timeout is KVT_E_ARG.
 *   - All functions may be called from any thread at the same time. Functions
 *     without a timeout do not block beyond microseconds, except kvt_store, which
 *     copies on the calling thread; kvt_lookup and kvt_stats (at most a second) and
 *     kvt_remove (5), which may ask a leader in another process; and closing, which
 *     waits until copies of that object have stopped.
 *   - The library never calls back. Completions and log records are polled
 *     behind one eventfd (kvt_eventfd).
 *
 * What a Go runtime does in your process (libkvtier.so holds one).
 *   - It starts a few threads and installs handlers for SIGSEGV, SIGBUS, SIGFPE,
 *     SIGPIPE and SIGURG; faults outside Go code are passed on to the handlers
 *     that were there. SIGINT, SIGTERM and SIGPROF stay yours.
 *   - fork: a child may not use the library; every function returns
 *     KVT_E_FORKED there at once. A child that does not call it, or that execs,
 *     is fine. Shared memory of the library is not inherited by children.
 *   - dlclose is a no-op. A second Go library in the same process is not
 *     supported by Go.
 *   - Configuration comes only through kvt_open, never from the environment.
 */
#ifndef KVTIER_H
#define KVTIER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h> /* KVT_INIT */

#if defined(__GNUC__) || defined(__clang__)
#define KVT_API __attribute__((visibility("default")))
#else
#define KVT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The ABI version: the major grows when a program must be recompiled. */
#define KVT_ABI_MAJOR 1
#define KVT_ABI_MINOR 1
#define KVT_ABI_VERSION ((uint32_t)((KVT_ABI_MAJOR << 16) | KVT_ABI_MINOR))

/* Set struct_size of a struct and zero the rest. */
#define KVT_INIT(x) (memset(&(x), 0, sizeof(x)), (x).struct_size = (uint32_t)sizeof(x))

typedef uint64_t kvt_cache;
typedef uint64_t kvt_blob;
typedef uint64_t kvt_rank;
typedef uint64_t kvt_coord;

typedef struct kvt_key { uint8_t b[32]; } kvt_key;

/* ---- results ---------------------------------------------------------- */

#define KVT_OK 0
#define KVT_E_ARG (-1)          /* an argument is wrong; nothing happened */
#define KVT_E_HANDLE (-2)       /* closed or invented handle */
#define KVT_E_CONFIG (-3)       /* configuration: kvt_last_error says which key and what to change */
#define KVT_E_IO (-4)           /* a path cannot be used: permissions, not a directory, other owner */
#define KVT_E_MISS (-5)         /* not held (absent, evicted, unreadable, or no cache right now) */
#define KVT_E_DECLINED (-6)     /* not stored: arena full, parent missing, or no cache right now */
#define KVT_E_BUSY (-7)         /* no room in a queue; try later */
#define KVT_E_TIMEOUT (-8)      /* the bound passed */
#define KVT_E_PENDING (-9)      /* no answer yet */
#define KVT_E_REFUSED (-10)     /* the group was refused: kvt_last_error says what differs */
#define KVT_E_STALE (-11)       /* the operation belongs to another leader session */
#define KVT_E_NO_LEADER (-12)   /* opening or reconnecting: everything is a miss for now */
#define KVT_E_BUFFER (-13)      /* buffer too small; the needed size was written */
#define KVT_E_NOT_SUPPORTED (-14)
#define KVT_E_FORKED (-15)      /* called in a forked child */
#define KVT_E_CLOSED (-16)
#define KVT_E_INTERNAL (-17)    /* a defect of the library; it switched itself off where it happened */
#define KVT_E_SELFTEST (-18)    /* kvt_selftest brought other bytes back: do not use the cache */

/* Static text of a code, never NULL. */
KVT_API const char *kvt_strerror(int32_t code);

/* Copies the message of the last failed call of this thread, always ending in
 * NUL when cap > 0; returns the length without NUL (may be >= cap: cut). A call
 * that succeeds leaves it as it was. */
KVT_API size_t kvt_last_error(char *buf, size_t cap);

/* The ABI version of the loaded library (compare the high half with
 * KVT_ABI_MAJOR) and its version text, e.g. "0.1.0". Either may be NULL. */
KVT_API int32_t kvt_version(uint32_t *abi, char *text, size_t cap);

/* ---- level 0: a cache -------------------------------------------------- */

/* Opens a cache. json: an object of settings, UTF-8, see docs/configuration.md;
 * unknown keys are errors that name the nearest known one. Returns at once:
 * becoming leader or member happens in the background, and until then
 * everything is a miss. Opening the same root twice in a process gives the same
 * cache, counted. Errors: KVT_E_CONFIG, KVT_E_IO. */
KVT_API int32_t kvt_open(const char *json, size_t len, kvt_cache *out);

/* Closes: drains what waits for disk within timeout_ms, wakes all waiters, ends
 * ranks, coordinators and blobs that were opened on it. A second call is
 * KVT_E_HANDLE and harmless. KVT_E_TIMEOUT: closed, but not all was drained, and
 * copies of ranks may still run: unregister ranks first to know when they end. */
KVT_API int32_t kvt_close(kvt_cache cache, int64_t timeout_ms);

#define KVT_STATE_OPENING 0
#define KVT_STATE_LEADER 1
#define KVT_STATE_MEMBER 2
#define KVT_STATE_CLOSED 3

/* state: one of KVT_STATE_*; detail: a line for people (may be NULL). */
KVT_API int32_t kvt_state(kvt_cache cache, int32_t *state, char *detail, size_t cap);

/* Waits until the cache is leader or member: KVT_OK or KVT_E_TIMEOUT. */
KVT_API int32_t kvt_wait_open(kvt_cache cache, int64_t timeout_ms);

/* ---- level 1: keys (pure; need no cache) -------------------------------- */

#define KVT_EXTRA_LORA 1          /* prefix, 32 bytes: SHA-256 over the adapter's content */
#define KVT_EXTRA_SALT 2          /* prefix, 32 bytes: SHA-256 of the salt's UTF-8 */
#define KVT_EXTRA_EPOCH 3         /* prefix, 16 bytes: from kvt_reset */
#define KVT_EXTRA_TAG 4           /* prefix, 32 bytes: SHA-256 of the tag's UTF-8 */
#define KVT_EXTRA_MULTIMODAL 16   /* chunk, 32 bytes: SHA-256 of (modality, identifier, length) */
#define KVT_EXTRA_PROMPT_EMBEDS 17/* chunk, 32 bytes */
#define KVT_EXTRA_SUCCESSOR 18    /* chunk, 4 bytes: the token after the chunk, little endian */

typedef struct kvt_extra {
    uint32_t chunk;     /* index of the chunk within the tokens handed over; 0 for prefix extras */
    uint16_t kind;      /* KVT_EXTRA_* */
    uint16_t length;    /* bytes used of `bytes` */
    int32_t offset;     /* item's start relative to the chunk's start, in tokens; 0 for prefix extras */
    uint8_t bytes[32];
} kvt_extra;

/* root = SHA256("kvtier-key-1\0" | fingerprint | n | extras), docs/format.md. */
KVT_API int32_t kvt_key_root(const uint8_t fingerprint[32], const kvt_extra *extras, size_t n, kvt_key *out);

/* Appends the keys of all full chunks of `tokens` to a prefix that ends in
 * *parent (the root for the first chunk). ntokens / chunk_tokens keys are
 * written to out (cap of them fit; KVT_E_BUFFER and *n = needed otherwise). */
KVT_API int32_t kvt_keys(const kvt_key *parent, uint32_t chunk_tokens, const uint32_t *tokens, size_t ntokens,
                         const kvt_extra *extras, size_t nextras, kvt_key *out, size_t cap, size_t *n);

/* ---- level 2: whole chunks in one buffer -------------------------------- */

/* json: {"model": name, "chunk_bytes": n, "chunk_tokens": n, and optionally
 * "weights", "kv_dtype", "attention", "quantisation": texts}: everything that
 * must be equal for bytes to be interchangeable. */
KVT_API int32_t kvt_blob_open(kvt_cache cache, const char *json, size_t len, kvt_blob *out);
KVT_API int32_t kvt_blob_close(kvt_blob blob);
/* Waits until puts and gets can work. KVT_E_TIMEOUT, KVT_E_REFUSED. */
KVT_API int32_t kvt_blob_ready(kvt_blob blob, int64_t timeout_ms, uint8_t fingerprint[32]);
/* Stores one chunk; bytes is exactly chunk_bytes. parent: key of the chunk
 * before it, NULL for ordinal 0. A chunk that is held already costs nothing and
 * is KVT_OK. KVT_E_DECLINED: not stored. KVT_E_TIMEOUT: it may be stored or not;
 * it can be put again. The bytes are copied before return. */
KVT_API int32_t kvt_put(kvt_blob blob, const kvt_key *key, const kvt_key *parent, uint32_t ordinal,
                        const void *payload, size_t bytes, int64_t timeout_ms);
/* Reads one chunk into buf (exactly chunk_bytes). On any error buf is unchanged
 * or holds bytes that must not be used: only KVT_OK means checked bytes. */
KVT_API int32_t kvt_get(kvt_blob blob, const kvt_key *key, void *buf, size_t bytes, int64_t timeout_ms);
/* How many leading keys are held at all, and how many of them in DRAM. */
KVT_API int32_t kvt_lookup(kvt_blob blob, const kvt_key *keys, size_t n, uint32_t *held, uint32_t *resident);
KVT_API int32_t kvt_remove(kvt_blob blob, const kvt_key *keys, size_t n);

/* ---- levels 3 and 4, coordinator ---------------------------------------- */

/* Joins group `group` (UTF-8, NUL-terminated, <= 255 bytes) of `ranks` rank
 * processes (1..64) as its coordinator. */
KVT_API int32_t kvt_coordinate(kvt_cache cache, const char *group, uint32_t ranks, kvt_coord *out);
KVT_API int32_t kvt_coord_close(kvt_coord coord);

/* What the leader accepted for a group; valid for one leader session. */
typedef struct kvt_accepted {
    uint32_t struct_size;
    uint32_t chunk_tokens, block_tokens;    /* C, B */
    uint32_t dcp, interleave;               /* D, I */
    uint32_t slots;
    uint64_t session;                       /* leader session */
    uint64_t slot_bytes;                    /* bytes of one chunk in DRAM and (plus 4096) on disk */
    uint64_t dram_bytes, disk_bytes;        /* budgets; 0 = no disk */
    uint8_t fingerprint[32];
} kvt_accepted;

/* Waits until the group is accepted: KVT_OK, KVT_E_TIMEOUT, KVT_E_REFUSED. */
KVT_API int32_t kvt_coord_ready(kvt_coord coord, int64_t timeout_ms, kvt_accepted *out);
/* The leader session now; 0 = none: everything is a miss. Never blocks. */
KVT_API int32_t kvt_coord_session(kvt_coord coord, uint64_t *session);

#define KVT_LEASE_PREFETCH 1u   /* start disk reads within the pin budget */
#define KVT_LEASE_PIN 2u        /* hold the slots of what is resident */

/* Sends a lease for a leading run; does not wait. The same id again replaces
 * atomically. Errors: KVT_E_BUSY, KVT_E_NO_LEADER (both: a miss). At most 8,189
 * keys count, a longer run is leased up to there. */
KVT_API int32_t kvt_lease(kvt_coord coord, uint64_t lease, const kvt_key *keys, size_t n, uint32_t flags);

typedef struct kvt_hits {
    uint32_t struct_size;
    uint32_t held;          /* leading chunks held anywhere */
    uint32_t resident;      /* leading chunks verified in DRAM (and pinned, with PIN) */
    uint32_t leased;        /* leading chunks that the lease keeps retrievable */
    uint32_t pending;       /* reads inside the pin budget that have not ended */
    uint32_t answer;        /* grows with every reply of this lease id, 1 for the first */
    uint64_t read_bytes;    /* bytes still to be read from disk for the leased run */
    uint64_t session;
} kvt_hits;

/* The newest reply for this lease id, after waiting up to timeout_ms for one
 * newer than `after` (0 = any). KVT_E_PENDING: none in time, or none under way
 * (out is the newest old one when answer > 0); KVT_E_MISS: lease unknown (never
 * sent, released, expired, other session). */
KVT_API int32_t kvt_lease_result(kvt_coord coord, uint64_t lease, uint32_t after, int64_t timeout_ms, kvt_hits *out);
KVT_API int32_t kvt_release(kvt_coord coord, uint64_t lease);
KVT_API int32_t kvt_renew(kvt_coord coord, const uint64_t *leases, size_t n);

#define KVT_GRANTED 1u
#define KVT_HAVE 2u
#define KVT_PENDING 3u      /* another operation is bringing it */
#define KVT_DECLINED 4u
#define KVT_READY 5u
#define KVT_FAILED 6u
#define KVT_LATER 7u        /* of a further window */

typedef struct kvt_verdict { uint32_t code, slot, generation, reserved; } kvt_verdict;

#define KVT_STORE_NO_DISK 1u

typedef struct kvt_store_begin_req {
    uint32_t struct_size;
    uint32_t first_ordinal;     /* of keys[0] */
    uint64_t op;                /* chosen by the coordinator, unique in its group, not 0 */
    kvt_key parent;             /* key before keys[0]; the root for ordinal 0 */
    const kvt_key *keys;
    size_t n;
    uint32_t flags;             /* KVT_STORE_* */
    int32_t status;             /* out: KVT_OK, or why there is no answer */
    kvt_verdict *verdicts;      /* out: n of them */
} kvt_store_begin_req;

/* Asks for slots, all requests sent first, then one wait of at most timeout_ms
 * for all. KVT_OK says that all were tried: look at the status of each. A request
 * without an answer is cancelled with the leader (status KVT_E_TIMEOUT): use a new
 * op later. *session: the leader session of the verdicts, 0 when there are none;
 * hand it to the ranks with them. */
KVT_API int32_t kvt_store_begin(kvt_coord coord, kvt_store_begin_req *reqs, size_t n, int64_t timeout_ms, uint64_t *session);

/* Begins a load of keys (ordinals first_ordinal..) that `lease` covers; the
 * operation takes the lease over. verdicts: n, READY for the leading chunks of
 * the first window, LATER for the rest. On any error the operation does not
 * exist at the leader; tell the ranks all the same (n_verdicts 0), so that they
 * report it. */
KVT_API int32_t kvt_load_begin(kvt_coord coord, uint64_t op, uint64_t lease, uint32_t first_ordinal,
                               const kvt_key *keys, size_t n, int64_t timeout_ms, kvt_verdict *verdicts, uint64_t *session);

/* Ends an operation. With KVT_CANCEL_UNSENT no rank has seen it or will: what it holds
 * is free as soon as no rank copies anything. Without, ranks may have it, and each still
 * answers by its kvt_store or kvt_load; only what is not decided yet fails. */
#define KVT_CANCEL_UNSENT 1u
KVT_API int32_t kvt_cancel(kvt_coord coord, uint64_t op, uint32_t flags);

/* New weights in a running engine: gives a random epoch for KVT_EXTRA_EPOCH of all
 * later keys; store those with KVT_STORE_NO_DISK. With KVT_E_NO_LEADER the epoch is
 * good, too: only leases of the old one live on until they expire. */
KVT_API int32_t kvt_reset(kvt_coord coord, uint8_t epoch[16]);

/* ---- level 4, ranks ------------------------------------------------------ */

/* Other ranks of the same DCP rank hold the same bytes: a latent where TP is larger
 * than DCP, a KV head that several TP ranks have. Written once, read by all. */
#define KVT_REGION_REPLICATED 1u
/* Not sharded over DCP: a page holds all dcp * block_tokens tokens of its block id, in
 * order, on every rank (t above is then the place among these). Means nothing when
 * dcp is 1. Not for opaque pages. */
#define KVT_REGION_ALL_ROWS 2u

/* One independently addressable piece of a page. Token t of block b (t = its
 * rank-local offset in the block) lies at base + b*block_stride + t*token_stride. */
typedef struct kvt_region {
    uint32_t struct_size;
    uint32_t group;             /* index of the KV group */
    char name[32];              /* e.g. "kv", "indexer.scale" */
    char component[16];         /* "target" or "draft" */
    int32_t layer, head;        /* global numbers; head -1 = none */
    uint32_t bytes;             /* per token; per block when pages are opaque */
    uint32_t flags;             /* KVT_REGION_* */
    void *base;
    int64_t block_stride, token_stride;   /* bytes; token_stride 0 when opaque */
} kvt_region;

/* json: {"group", "ranks", "rank", "model", "chunk_tokens", "block_tokens",
 * "num_blocks", "dcp", "dcp_rank", "interleave", "encoding" ("rows" or the name
 * of an opaque page format), "kv_dtype", "attention", "kv_scales", "quantisation",
 * "draft", "weights" (rank 0), "memory_only", "groups": [{"kind": "full",
 * "tokens_per_row": 1}], "provenance": {text: text}}. Left out: one rank, no DCP,
 * encoding "rows", one group as above, empty texts. Unknown keys are KVT_E_CONFIG.
 * Returns at once; the group is accepted or refused in the background
 * (kvt_rank_ready). */
KVT_API int32_t kvt_register(kvt_cache cache, const char *json, size_t len, const kvt_region *regions, size_t n, kvt_rank *out);
/* Ends all copies of this rank first; once it has returned KVT_OK the pages are not
 * touched any more. KVT_E_TIMEOUT: they may be, and the handle stays; call again. */
KVT_API int32_t kvt_unregister(kvt_rank rank, int64_t timeout_ms);
KVT_API int32_t kvt_rank_ready(kvt_rank rank, int64_t timeout_ms, kvt_accepted *out);

#define KVT_SELFTEST_PAGES 1u  /* through this rank's own pages, which nobody else may use meanwhile */

/* Sends a pattern from the pages of all ranks of the group through the arena and the
 * disk, if there is one, and back, and compares every byte. All ranks call it, each in
 * its process or thread, when the group is accepted and before the first request; it
 * blocks for up to timeout_ms (at most 60,000). Without KVT_SELFTEST_PAGES, or with
 * fewer pages than a chunk needs, private memory stands for the pages; with it they
 * hold afterwards what they held before, whatever the verdict, and block 0 is not
 * touched. Nothing of the test stays in the cache.
 *
 * All ranks get the same verdict: KVT_OK. KVT_E_SELFTEST: bytes came back wrong, or a
 * region reaches memory that is not there; kvt_last_error names rank, region, token
 * and byte. KVT_E_TIMEOUT: not all ranks came to the end in time, or one ended:
 * nothing is proven, the cache can be used. Besides KVT_E_NO_LEADER (no accepted
 * group), KVT_E_BUSY (a self-test of this rank runs), KVT_E_CLOSED. */
KVT_API int32_t kvt_selftest(kvt_rank rank, uint32_t flags, uint32_t timeout_ms);

typedef struct kvt_grant { uint32_t index, slot, generation, reserved; } kvt_grant;  /* index: key number in the op */

typedef struct kvt_store_op {
    uint32_t struct_size;
    uint32_t first_ordinal;
    uint64_t op, session;       /* from the coordinator */
    const kvt_grant *grants;
    size_t ngrants;
    const uint32_t *blocks;     /* block ids of virtual blocks floor(first_ordinal*C/V) .. */
    size_t nblocks;
} kvt_store_op;

/* Copies this rank's rows of every granted chunk into its slot on the calling
 * thread and reports every grant to the leader. KVT_E_STALE: other session, nothing
 * to do. KVT_OK also when the leader took single slots back meanwhile. After another
 * error (KVT_E_ARG: the blocks do not fit) chunks were not copied, and aborted. */
KVT_API int32_t kvt_store(kvt_rank rank, const kvt_store_op *op);

typedef struct kvt_load_op {
    uint32_t struct_size;
    uint32_t nchunks;           /* keys of the op: as many as the range touches */
    uint64_t op, session;
    uint64_t first_token, tokens;   /* absolute range that may be written: clipped at both ends */
    const uint32_t *blocks;     /* block ids of exactly that range: blocks[0] is virtual block first_token / V */
    size_t nblocks;
    const kvt_verdict *verdicts;/* of the first window; 0 verdicts = failed load, only reported */
    size_t nverdicts;
} kvt_load_op;

/* Starts a load. After KVT_OK exactly one KVT_EVENT_LOAD follows for it in kvt_poll,
 * when this rank's own copy has stopped, also on failure and on another session.
 * After an error (KVT_E_ARG, KVT_E_BUSY, KVT_E_CLOSED) none does, and the leader has
 * been told that this rank ends op: nothing stays pinned for it, the other ranks'
 * loads fail where they still wait, and trying again takes a new op. Count such a
 * load as failed. (Not told: a struct that cannot be read, op 0, a wrong handle.) */
KVT_API int32_t kvt_load(kvt_rank rank, const kvt_load_op *op);
/* Asks a running load to stop early; its event still comes. */
KVT_API int32_t kvt_load_cancel(kvt_rank rank, uint64_t op);
/* May these pages be reused? Stores are synchronous for host memory: KVT_OK at once. */
KVT_API int32_t kvt_fence(kvt_rank rank, const uint32_t *blocks, size_t n, int64_t timeout_ms);

/* ---- completions ---------------------------------------------------------- */

#define KVT_EVENT_LOAD 1u

typedef struct kvt_event {
    uint32_t kind;          /* KVT_EVENT_* */
    int32_t status;         /* KVT_OK, or KVT_E_MISS, _TIMEOUT, _STALE, _CLOSED (cancelled) */
    uint64_t op;
    uint64_t handle;        /* the rank */
    uint32_t failed_chunk;  /* index in the op of the first chunk not loaded; = nchunks when all are */
    uint32_t tokens;        /* in the pages, from first_token on; what follows holds anything */
    uint64_t reserved;
} kvt_event;

/* Takes up to cap completions; *n of them were written. Never blocks. */
KVT_API int32_t kvt_poll(kvt_cache cache, kvt_event *events, size_t cap, size_t *n);
/* A descriptor that is readable while kvt_poll or kvt_log_poll has something.
 * It belongs to the library: poll it, do not read or close it. */
KVT_API int32_t kvt_eventfd(kvt_cache cache, int32_t *fd);

/* ---- level 5: views, for engines that copy themselves ----------------------- */

typedef struct kvt_view {
    void *ptr;              /* into the arena */
    size_t width, pitch, rows;  /* one 2-D copy: rows of width bytes, pitch apart */
    uint32_t index;         /* key number in the op */
    uint32_t region;
} kvt_view;

#define KVT_DIR_STORE 1u
#define KVT_DIR_LOAD 2u
/* Not supported yet for any memory: both answer KVT_E_NOT_SUPPORTED. */
KVT_API int32_t kvt_begin(kvt_rank rank, uint32_t direction, uint64_t op, kvt_view *views, size_t cap, size_t *n);
KVT_API int32_t kvt_commit(kvt_rank rank, uint64_t op, const uint8_t *ok, size_t n);

/* ---- level 6: maintenance ---------------------------------------------------- */

/* Statistics as JSON, NUL-terminated. *need: bytes needed with NUL. */
KVT_API int32_t kvt_stats(kvt_cache cache, char *buf, size_t cap, size_t *need);
/* Waits until nothing waits for disk. */
KVT_API int32_t kvt_flush(kvt_cache cache, int64_t timeout_ms);

#define KVT_LOG_DEBUG 0
#define KVT_LOG_INFO 1
#define KVT_LOG_WARN 2
#define KVT_LOG_ERROR 3

typedef struct kvt_record {
    int64_t time_ns;        /* Unix */
    int32_t level;          /* KVT_LOG_* */
    uint32_t dropped;       /* records lost before this one */
    char text[496];         /* UTF-8, NUL-terminated, cut to fit */
} kvt_record;

/* Takes up to cap log records; *n of them were written. Never blocks. */
KVT_API int32_t kvt_log_poll(kvt_cache cache, kvt_record *records, size_t cap, size_t *n);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_H */
