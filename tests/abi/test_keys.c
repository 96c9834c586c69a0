/* Level 1 against the published test vectors. argv[1]: the file with them. */
#include "check.h"

#define MAX_TOKENS 65536
#define MAX_KEYS 256
#define MAX_EXTRAS 64

/* One case of the file. */
static struct {
    char name[128];
    uint8_t fingerprint[32];
    uint32_t chunk_tokens;
    kvt_extra prefix[MAX_EXTRAS], extras[MAX_EXTRAS];
    size_t nprefix, nextras;
    uint32_t tokens[MAX_TOKENS];
    size_t ntokens;
    kvt_key root, keys[MAX_KEYS];
    size_t nkeys;
    int complete;
} c;

static int cases;

static size_t unhex(uint8_t *out, size_t cap, const char *hex)
{
    size_t n = 0;
    for (unsigned byte; n < cap && sscanf(hex + 2 * n, "%2x", &byte) == 1; n++)
        out[n] = (uint8_t)byte;
    return n;
}

static void check_case(void)
{
    kvt_key root, keys[MAX_KEYS + 1];
    size_t n = 99;

    if (!c.complete)
        return;
    cases++;
    printf("%s: %zu tokens, %zu keys\n", c.name, c.ntokens, c.nkeys);
    OK(kvt_key_root(c.fingerprint, c.prefix, c.nprefix, &root));
    CHECK(memcmp(&root, &c.root, sizeof root) == 0);
    CHECK(c.ntokens / c.chunk_tokens == c.nkeys);
    memset(keys, 0xee, sizeof keys);
    OK(kvt_keys(&root, c.chunk_tokens, c.tokens, c.ntokens, c.extras, c.nextras, keys, c.nkeys, &n));
    CHECK(n == c.nkeys);
    CHECK(memcmp(keys, c.keys, n * sizeof keys[0]) == 0);
    CHECK(keys[n].b[0] == 0xee && keys[n].b[31] == 0xee);

    /* A chain may be continued anywhere. */
    if (c.nkeys > 1 && c.nextras == 0) {
        kvt_key key;
        OK(kvt_keys(&c.keys[c.nkeys - 2], c.chunk_tokens, c.tokens + (c.nkeys - 1) * c.chunk_tokens, c.chunk_tokens,
                    NULL, 0, &key, 1, &n));
        CHECK(n == 1 && memcmp(&key, &c.keys[c.nkeys - 1], sizeof key) == 0);
    }
    /* One key too little room: nothing is written, the need is named. */
    if (c.nkeys > 0) {
        CHECK_RC(kvt_keys(&root, c.chunk_tokens, c.tokens, c.ntokens, c.extras, c.nextras, keys, c.nkeys - 1, &n),
                 KVT_E_BUFFER);
        CHECK(n == c.nkeys);
    }
}

static void read_extra(kvt_extra *x, const char *line, int with_chunk)
{
    unsigned chunk = 0, kind;
    int offset, used = 0;
    memset(x, 0, sizeof *x);
    if (with_chunk)
        CHECK(sscanf(line, "%u %u %d %n", &chunk, &kind, &offset, &used) == 3);
    else
        CHECK(sscanf(line, "%u %d %n", &kind, &offset, &used) == 2);
    x->chunk = chunk;
    x->kind = (uint16_t)kind;
    x->offset = offset;
    x->length = (uint16_t)unhex(x->bytes, sizeof x->bytes, line + used);
}

static void read_file(const char *path)
{
    static char line[1 << 16];
    FILE *f = fopen(path, "r");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f) != NULL) {
        char *value = strchr(line, ' ');
        line[strcspn(line, "\n")] = '\0';
        if (value == NULL)
            continue;
        *value++ = '\0';
        if (strcmp(line, "case") == 0 || strcmp(line, "digest") == 0) {
            check_case();
            memset(&c, 0, sizeof c);
            snprintf(c.name, sizeof c.name, "%s", value);
        } else if (strcmp(line, "fingerprint") == 0) {
            CHECK(unhex(c.fingerprint, 32, value) == 32);
        } else if (strcmp(line, "chunk_tokens") == 0) {
            c.chunk_tokens = (uint32_t)strtoul(value, NULL, 10);
        } else if (strcmp(line, "prefix") == 0) {
            read_extra(&c.prefix[c.nprefix++], value, 0);
        } else if (strcmp(line, "extra") == 0) {
            read_extra(&c.extras[c.nextras++], value, 1);
        } else if (strcmp(line, "tokens") == 0) {
            for (char *t = strtok(value, " "); t != NULL; t = strtok(NULL, " "))
                c.tokens[c.ntokens++] = (uint32_t)strtoul(t, NULL, 10);
        } else if (strcmp(line, "root") == 0) {
            CHECK(unhex(c.root.b, 32, value) == 32);
            c.complete = 1;
        } else if (strcmp(line, "key") == 0) {
            CHECK(unhex(c.keys[c.nkeys++].b, 32, value) == 32);
        }
    }
    fclose(f);
    check_case();
}

static void refusals(void)
{
    static const uint8_t fingerprint[32];
    uint32_t tokens[8] = {0};
    kvt_extra x = {0, KVT_EXTRA_SALT, 32, 0, {0}};
    kvt_key root, key;
    size_t n;

    OK(kvt_key_root(fingerprint, &x, 1, &root));
    x.length = 33;
    CHECK_RC(kvt_key_root(fingerprint, &x, 1, &root), KVT_E_ARG);
    x.length = 31;
    CHECK_RC(kvt_key_root(fingerprint, &x, 1, &root), KVT_E_ARG);
    CHECK_SAYS("31 bytes");
    x.length = 32;
    x.kind = KVT_EXTRA_MULTIMODAL;
    CHECK_RC(kvt_key_root(fingerprint, &x, 1, &root), KVT_E_ARG);
    x.kind = KVT_EXTRA_SALT;
    CHECK_RC(kvt_keys(&root, 8, tokens, 8, &x, 1, &key, 1, &n), KVT_E_ARG);
    CHECK_RC(kvt_keys(&root, 0, tokens, 8, NULL, 0, &key, 1, &n), KVT_E_ARG);
    CHECK_RC(kvt_keys(&root, 8, NULL, 8, NULL, 0, &key, 1, &n), KVT_E_ARG);
    CHECK_RC(kvt_keys(NULL, 8, tokens, 8, NULL, 0, &key, 1, &n), KVT_E_ARG);
    CHECK_RC(kvt_keys(&root, 8, tokens, SIZE_MAX, NULL, 0, &key, 1, &n), KVT_E_ARG);
    CHECK_RC(kvt_keys(&root, 8, tokens, 8, &x, SIZE_MAX, &key, 1, &n), KVT_E_ARG);
    OK(kvt_keys(&root, 8, NULL, 0, NULL, 0, NULL, 0, &n));
    CHECK(n == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    read_file(argv[1]);
    CHECK(cases >= 10);
    refusals();
    return 0;
}
