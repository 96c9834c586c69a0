"""Opens a cache in a directory, computes the keys of a prompt, puts the chunks that
are not held yet and gets all of them back. Run it twice: the second run finds on disk
what the first one stored.

    PYTHONPATH=python python examples/python/put_get.py /var/tmp/kv
"""

import json
import sys

import numpy as np

import kvtier

CHUNKS = 4
CHUNK_TOKENS = 256
CHUNK_BYTES = 1 << 20


def compute(chunk: int) -> np.ndarray:
    """Stands for the KV cache that an engine computes."""
    i = np.arange(CHUNK_BYTES)
    return (i * 31 + i // 4096 + chunk).astype(np.uint8)


def main(directory: str) -> None:
    settings = {"disk_path": directory, "dram_gib": 0.125, "disk_gib": 1}
    with kvtier.Cache.open(settings) as cache:
        if not cache.wait_open(10):
            sys.exit(f"the cache did not open: {cache.state()[1]}")
        blob = cache.blob("example", CHUNK_BYTES, CHUNK_TOKENS)
        root = kvtier.keys.root(blob.ready(10))
        prompt = np.arange(CHUNKS * CHUNK_TOKENS, dtype=np.uint32)
        keys = kvtier.keys.chain(root, CHUNK_TOKENS, prompt)

        held, _ = blob.lookup(keys)
        print(f"{held} of {len(keys)} chunks were there")
        for i in range(held, len(keys)):
            parent = keys[i - 1] if i else None
            if not blob.put(keys[i], compute(i), parent=parent, ordinal=i, timeout_s=5):
                print(f"chunk {i} was declined")
        back = np.empty(CHUNK_BYTES, np.uint8)
        for i, key in enumerate(keys):
            if blob.get(key, out=back, timeout_s=5) is None:
                sys.exit(f"chunk {i} is missing")
            if not np.array_equal(back, compute(i)):
                sys.exit(f"chunk {i} differs")
        print(json.dumps(cache.stats()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY")
    main(sys.argv[1])
