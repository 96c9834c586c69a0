"""Writes layout.json and layouts.json: golden namespaces, from a second
implementation of the row order, the canonical JSON and the layout. Only the
standard library. Run it in this directory.

layout.json is one sidecar as it lies on disk. layouts.json holds several
namespaces, each with its regions in the order handed over, and what must come of
it: the canonical text, the fingerprint, the directory, the numbers of the layout.
"""

import hashlib
import json
import random
import string


def align(width):
    return next(a for a in (16, 8, 4, 2, 1) if width % a == 0)


def row_order(regions):
    return sorted(range(len(regions)), key=lambda i: (
        -align(regions[i]["bytes"]), ["target", "draft"].index(regions[i]["component"]),
        regions[i]["layer"], regions[i]["name"].encode(), regions[i]["head"]))


def up(n, to):
    return -(-n // to) * to


def slug(model):
    pieces = []
    for byte in model.encode():
        char = chr(byte)
        piece = char if char in string.ascii_letters + string.digits + "._-" else "%%%02X" % byte
        if sum(map(len, pieces)) + len(piece) > 64:
            break
        pieces.append(piece)
    return "".join(pieces)


def region(name, layer, width, head=-1, component="target"):
    return {"name": name, "layer": layer, "bytes": width, "head": head, "component": component}


def namespace(groups, chunk_tokens=256, **fields):
    ns = {
        "attention": hashlib.sha256(b"attention").hexdigest(), "chunk_tokens": chunk_tokens, "draft": "",
        "encoding": "rows", "format": 1, "groups": groups, "key_scheme": 1, "kv_dtype": "bfloat16", "kv_scales": "",
        "model": "org/model", "quantisation": "", "weights": hashlib.sha256(b"weights").hexdigest(),
    }
    ns.update(fields)
    return ns


def golden(name, ns):
    canonical = json.loads(json.dumps(ns))
    layout, total = [], 0
    for group in canonical["groups"]:
        order = row_order(group["regions"])
        offsets, width = [0] * len(order), 0
        for i in order:
            offsets[i] = width
            width += group["regions"][i]["bytes"]
        rows, stride = ns["chunk_tokens"] // group["tokens_per_row"], up(width, 64)
        layout.append({"rows": rows, "row_bytes": width, "row_stride": stride, "offset": total, "region_offsets": offsets})
        total += rows * stride
        group["regions"] = [group["regions"][i] for i in order]
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return {
        "name": name, "given": ns, "canonical": text, "fingerprint": fingerprint,
        "directory": slug(ns["model"]) + "@" + fingerprint[:32], "groups": layout,
        "payload_bytes": total, "padded_bytes": up(total, 4096), "file_bytes": up(total, 4096) + 4096,
    }


def full(regions, tokens_per_row=1):
    return {"kind": "full", "regions": regions, "tokens_per_row": tokens_per_row}


glm = [region("kv", i, 656) for i in range(4)]
glm += [region("indexer", i, 128) for i in range(4)] + [region("indexer_scale", i, 4) for i in range(4)]
glm += [region("kv", 0, 656, component="draft")]
random.Random(1).shuffle(glm)
heads = [region(n, i, 256, head=h) for i in (10, 2) for n in ("v", "k") for h in (3, 11, 0)]

CASES = [
    golden("latent, indexer, draft", namespace([full(glm)], model="zai-org/GLM-5.2", draft="zai-org/GLM-5.2-mtp", kv_dtype="fp8_ds_mla")),
    golden("one head a region", namespace([full(heads)])),
    golden("odd widths", namespace([full([region("a", 0, 1), region("b", 0, 132), region("c", 0, 432), region("d", 0, 6), region("e", 0, 24)])], chunk_tokens=3)),
    golden("two groups", namespace([full([region("k", 0, 100)]), full([region("k", 1, 64)])], chunk_tokens=7)),
    golden("opaque pages", namespace([full([region("kv", i, 65536) for i in range(2)], 16)], encoding="vllm-cpu-avx512-b16")),
    golden("blob", namespace([{"kind": "blob", "regions": [region("data", -1, 1000003)], "tokens_per_row": 512}], chunk_tokens=512, attention="", weights="")),
    golden("text that needs care", namespace([full([region('na"me\\', 0, 16)])], model='Ünï/"qu\\ote"\t\x01<&>\u2028\x7f' + "x" * 40, quantisation="\b\f\n\r")),
    golden("slug cut before an escape", namespace([full([region("k", 0, 16)])], model="m" * 62 + "/tail")),
]

if __name__ == "__main__":
    with open("layout.json", "w", encoding="utf-8") as out:
        out.write(CASES[0]["canonical"])
    with open("layouts.json", "w", encoding="utf-8") as out:
        json.dump(CASES, out, indent=1)
        out.write("\n")
