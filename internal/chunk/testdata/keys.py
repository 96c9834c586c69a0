"""Writes keys.json and keys.txt: test vectors for the keys of chunks.

This is a second implementation of the key encoding, on purpose not derived from
the Go one: only hashlib and struct. Run it in this directory.

keys.txt says the same for readers without a JSON parser: one case per block,
blocks are separated by an empty line, every line is a name and its values.

  case NAME
  fingerprint HEX
  prefix KIND OFFSET HEX            any number, in the order handed over
  chunk_tokens C
  tokens N N ...                    any number of lines of at most 16
  extra CHUNK KIND OFFSET HEX       any number, in the order handed over
  root HEX
  key HEX                           one per full chunk

and blocks "digest NAME" with "text HEX of the UTF-8" and "sha256 HEX".
"""

import hashlib
import json
import struct

LORA, SALT, EPOCH, TAG = 1, 2, 3, 4
ITEM, EMBEDS, SUCCESSOR = 16, 17, 18


def sha(data):
    return hashlib.sha256(data).digest()


def encode(extras):
    out = struct.pack("<I", len(extras))
    for kind, offset, data in extras:
        out += struct.pack("<HHi", kind, len(data), offset) + data
    return out


def root_key(fingerprint, prefix):
    ordered = sorted(prefix, key=lambda x: x[0])
    return sha(b"kvtier-key-1\0" + fingerprint + encode(ordered))


def chunk_key(parent, tokens, extras):
    ordered = sorted(extras, key=lambda x: (x[1], x[0], x[2]))
    words = struct.pack("<%dI" % len(tokens), *tokens)
    return sha(b"kvtier-chunk-1\0" + parent + struct.pack("<I", len(tokens)) + words + encode(ordered))


def case(name, c, tokens, prefix=(), extras=(), fingerprint=sha(b"namespace")):
    root = root_key(fingerprint, prefix)
    keys, parent = [], root
    for i in range(len(tokens) // c):
        mine = [x[1:] for x in extras if x[0] == i]
        parent = chunk_key(parent, tokens[i * c:(i + 1) * c], mine)
        keys.append(parent)
    return {
        "name": name,
        "fingerprint": fingerprint.hex(),
        "prefix": [{"kind": k, "offset": o, "bytes": b.hex()} for k, o, b in prefix],
        "chunk_tokens": c,
        "tokens": list(tokens),
        "extras": [{"chunk": i, "kind": k, "offset": o, "bytes": b.hex()} for i, k, o, b in extras],
        "root": root.hex(),
        "keys": [k.hex() for k in keys],
    }


def ramp(n, start=0, step=7):
    return [(start + step * i) % 150000 for i in range(n)]


item = sha(b"a picture of 10 tokens")
sound = sha(b"its sound, of 10 tokens")
CASES = [
    case("empty", 256, []),
    case("empty, other namespace", 256, [], fingerprint=bytes(range(32))),
    case("unfinished chunk", 256, ramp(255)),
    case("one chunk", 256, ramp(256)),
    case("chain of three", 256, ramp(3 * 256 + 5)),
    case("tokens at the edges of u32", 4, [0, 1, 2**31, 2**32 - 1]),
    case("one token a chunk", 1, [5, 5, 5]),
    case("salt", 256, ramp(256), prefix=[(SALT, 0, sha("Grüße".encode()))]),
    case("lora", 256, ramp(256), prefix=[(LORA, 0, sha(b"adapter content"))]),
    case("epoch", 256, ramp(256), prefix=[(EPOCH, 0, bytes(range(16)))]),
    case("all prefix extras, not in order", 256, ramp(256), prefix=[
        (TAG, 0, sha(b"tag")), (EPOCH, 0, bytes(range(16))), (LORA, 0, sha(b"adapter content")), (SALT, 0, sha(b"salt"))]),
    case("item over a chunk border", 16, ramp(48), extras=[(0, ITEM, 10, item), (1, ITEM, -6, item)]),
    case("item over three chunks", 4, ramp(12), extras=[(0, ITEM, 1, item), (1, ITEM, -3, item), (2, ITEM, -7, item)]),
    case("items not in order", 16, ramp(16), extras=[(0, ITEM, 8, item), (0, ITEM, -2, sound), (0, EMBEDS, 0, sha(b"embeds"))]),
    case("two items at one token", 16, ramp(16), extras=[(0, ITEM, 2, sound), (0, ITEM, 2, item)]),
    case("successor", 256, ramp(257), extras=[(0, SUCCESSOR, 256, struct.pack("<I", ramp(257)[256]))]),
    case("successors of a chain", 4, [1, 2, 3, 4, 5, 6, 7, 8, 9], extras=[
        (0, SUCCESSOR, 4, struct.pack("<I", 5)), (1, SUCCESSOR, 4, struct.pack("<I", 9))]),
    case("everything", 16, ramp(33), prefix=[(SALT, 0, sha(b"salt")), (LORA, 0, sha(b"adapter content"))], extras=[
        (0, SUCCESSOR, 16, struct.pack("<I", ramp(33)[16])), (0, ITEM, 10, item),
        (1, SUCCESSOR, 16, struct.pack("<I", ramp(33)[32])), (1, ITEM, -6, item)]),
]
TEXTS = [("empty", ""), ("plain", "tenant-7"), ("beyond ASCII", "Grüße, 世界")]
DIGESTS = [{"name": n, "text": t, "sha256": sha(t.encode()).hex()} for n, t in TEXTS]


def flat():
    blocks = []
    for c in CASES:
        lines = ["case " + c["name"], "fingerprint " + c["fingerprint"]]
        lines += ["prefix %(kind)d %(offset)d %(bytes)s" % x for x in c["prefix"]]
        lines.append("chunk_tokens %d" % c["chunk_tokens"])
        for i in range(0, len(c["tokens"]), 16):
            lines.append("tokens " + " ".join(map(str, c["tokens"][i:i + 16])))
        lines += ["extra %(chunk)d %(kind)d %(offset)d %(bytes)s" % x for x in c["extras"]]
        lines.append("root " + c["root"])
        lines += ["key " + k for k in c["keys"]]
        blocks.append("\n".join(lines) + "\n")
    for d in DIGESTS:
        blocks.append("digest %s\ntext %s\nsha256 %s\n" % (d["name"], d["text"].encode().hex(), d["sha256"]))
    return "\n".join(blocks)


if __name__ == "__main__":
    with open("keys.json", "w", encoding="utf-8") as out:
        json.dump({"cases": CASES, "digests": DIGESTS}, out, ensure_ascii=False)
        out.write("\n")
    with open("keys.txt", "w", encoding="utf-8") as out:
        out.write(flat())
