// The same as examples/c/put_get.c, with the owning classes of kvtier.hpp.
//
//   c++ -std=c++17 -Iinclude examples/cpp/put_get.cpp -Lbuild -lkvtier -Wl,-rpath,$PWD/build -o put_get
//   ./put_get /var/tmp/kv
#include <cstring>
#include <iostream>
#include <numeric>

#include "kvtier.hpp"

namespace {

constexpr std::uint32_t chunk_tokens = 256;
constexpr std::size_t chunks = 4, chunk_bytes = 1 << 20;

// Stands for the KV cache that an engine computes.
std::vector<unsigned char> compute(std::size_t chunk)
{
    std::vector<unsigned char> kv(chunk_bytes);
    for (std::size_t i = 0; i < kv.size(); i++)
        kv[i] = static_cast<unsigned char>(i * 31 + i / 4096 + chunk);
    return kv;
}

int run(const std::string &directory)
{
    kvtier::cache cache(R"({"disk_path": ")" + directory + R"(", "dram_gib": 0.125, "disk_gib": 1})");
    if (!cache.wait_open(10000)) {
        std::cerr << "the cache did not open: " << cache.state().second << "\n";
        return 1;
    }
    kvtier::blob blob(cache.get(), R"({"model": "example", "chunk_bytes": 1048576, "chunk_tokens": 256})");

    std::vector<std::uint32_t> prompt(chunks * chunk_tokens);
    std::iota(prompt.begin(), prompt.end(), 0u);
    auto keys = kvtier::keys(kvtier::root(blob.ready(10000)), chunk_tokens, prompt.data(), prompt.size());

    auto held = blob.lookup(keys).first;
    std::cout << held << " of " << keys.size() << " chunks were there\n";
    for (std::size_t i = held; i < keys.size(); i++) {
        auto kv = compute(i);
        if (!blob.put(keys[i], i == 0 ? nullptr : &keys[i - 1], static_cast<std::uint32_t>(i), kv.data(), kv.size(), 5000))
            std::cout << "chunk " << i << " was declined\n";
    }
    for (std::size_t i = 0; i < keys.size(); i++) {
        std::vector<unsigned char> back(chunk_bytes);
        if (!blob.get(keys[i], back.data(), back.size(), 5000) || back != compute(i)) {
            std::cerr << "chunk " << i << " is missing or differs\n";
            return 1;
        }
    }
    std::cout << cache.stats() << "\n";
    return 0;
}

} // namespace

int main(int argc, char **argv)
{
    if (argc != 2) {
        std::cerr << "usage: " << argv[0] << " DIRECTORY\n";
        return 2;
    }
    try {
        return run(argv[1]);
    } catch (const kvtier::error &e) {
        std::cerr << e.what() << "\n";
        return 1;
    }
}
