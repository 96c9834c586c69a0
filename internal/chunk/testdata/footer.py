"""Writes footer.bin: a golden footer, from a second implementation. Needs the
xxhash package. Run it in this directory. footer_test.go has the same values."""

import struct

import xxhash


def hash128(data):
    return xxhash.xxh3_128(data).intdigest().to_bytes(16, "little")


provenance = b'{"D":4,"I":16}'
page = bytearray(4096)


def put(offset, fmt, *values):
    struct.pack_into("<" + fmt, page, offset, *values)


put(0, "8s", b"KVTCHNK1")
put(8, "HHI", 1, 0, 4096)
put(16, "32s", bytes(range(32)))
put(48, "32s", bytes(range(100, 132)))
put(80, "QQ", 7 * 128 + 7 * 64, 4096)
put(96, "II", 7, 3)
put(104, "I", 0)
put(108, "B", 1)
put(112, "16s", hash128(bytes(i % 251 for i in range(4096))))
put(128, "32s", bytes(range(200, 232)))
put(160, "Q", 1700000000123456789)
put(168, "Q", 0x0123456789ABCDEF)
put(184, "II", 2, len(provenance))
put(256, "IIII", 7, 128, 1, 1)
put(272, "IIII", 7, 64, 1, 1)
put(1280, "%ds" % len(provenance), provenance)
put(4080, "16s", hash128(bytes(page[:4080])))

with open("footer.bin", "wb") as out:
    out.write(page)
