/* The structs of ABI 1.0 as numbers: what a program was compiled with once must stay
 * where it is. A change here is a new major version, appending fields excepted. */
#include "check.h"

#define SIZE(type, size) CHECK(sizeof(type) == (size))
#define AT(type, field, offset) CHECK(offsetof(type, field) == (offset))

int main(void)
{
    uint32_t abi = 0;
    char text[32];

    OK(kvt_version(&abi, text, sizeof text));
    CHECK(abi == KVT_ABI_VERSION && abi >> 16 == 1);
    CHECK(strlen(text) >= 5);
    OK(kvt_version(NULL, NULL, 0));
    OK(kvt_version(NULL, text, 3));
    CHECK(strlen(text) == 2);

    SIZE(kvt_key, 32);
    SIZE(kvt_extra, 44);
    AT(kvt_extra, kind, 4);
    AT(kvt_extra, offset, 8);
    AT(kvt_extra, bytes, 12);
    SIZE(kvt_accepted, 88);
    AT(kvt_accepted, slots, 20);
    AT(kvt_accepted, session, 24);
    AT(kvt_accepted, disk_bytes, 48);
    AT(kvt_accepted, fingerprint, 56);
    SIZE(kvt_hits, 40);
    AT(kvt_hits, answer, 20);
    AT(kvt_hits, read_bytes, 24);
    AT(kvt_hits, session, 32);
    SIZE(kvt_verdict, 16);
    SIZE(kvt_store_begin_req, 80);
    AT(kvt_store_begin_req, op, 8);
    AT(kvt_store_begin_req, parent, 16);
    AT(kvt_store_begin_req, keys, 48);
    AT(kvt_store_begin_req, status, 68);
    AT(kvt_store_begin_req, verdicts, 72);
    SIZE(kvt_region, 96);
    AT(kvt_region, name, 8);
    AT(kvt_region, component, 40);
    AT(kvt_region, layer, 56);
    AT(kvt_region, base, 72);
    AT(kvt_region, token_stride, 88);
    SIZE(kvt_grant, 16);
    SIZE(kvt_store_op, 56);
    AT(kvt_store_op, grants, 24);
    AT(kvt_store_op, nblocks, 48);
    SIZE(kvt_load_op, 72);
    AT(kvt_load_op, first_token, 24);
    AT(kvt_load_op, nverdicts, 64);
    SIZE(kvt_event, 40);
    AT(kvt_event, handle, 16);
    AT(kvt_event, tokens, 28);
    SIZE(kvt_view, 40);
    SIZE(kvt_record, 512);
    AT(kvt_record, text, 16);

    for (int32_t code = 0; code >= KVT_E_SELFTEST; code--)
        CHECK(strcmp(kvt_strerror(code), "unknown code") != 0);
    CHECK(strcmp(kvt_strerror(1), "unknown code") == 0);
    CHECK(strcmp(kvt_strerror(KVT_E_SELFTEST - 1), "unknown code") == 0);
    return 0;
}
