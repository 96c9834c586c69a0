#include "model.hpp"

#include <cstring>

namespace engine {
namespace {

constexpr std::int32_t layers = 6, odd_layer = 6, draft_layer = 7;

std::uint64_t mix(std::uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

std::vector<column> columns_with_heads(std::uint32_t first, std::uint32_t count)
{
    std::vector<column> out;
    for (std::int32_t layer = 0; layer < layers; layer++) {
        out.push_back({"kv", false, layer, -1, 656, false});
        if (layer % 2 == 0) {
            out.push_back({"indexer", false, layer, -1, 128, true});
            out.push_back({"indexer.scale", false, layer, -1, 4, true});
        }
    }
    out.push_back({"kv", false, odd_layer, -1, 432, false});
    for (std::uint32_t head = first; head < first + count; head++)
        out.push_back({"kv", true, draft_layer, static_cast<std::int32_t>(head), 128, false});
    return out;
}

} // namespace

std::uint64_t column::id() const
{
    std::uint64_t h = 1469598103934665603u;
    for (char c : text())
        h = (h ^ static_cast<unsigned char>(c)) * 1099511628211u;
    return h;
}

std::string column::text() const
{
    std::string out = name + " of layer " + std::to_string(layer);
    if (head >= 0)
        out += ", head " + std::to_string(head);
    return draft ? out + " (draft)" : out;
}

std::vector<column> columns_of(const topology &t, std::uint32_t rank)
{
    return columns_with_heads(t.first_head(rank), t.head_count());
}

std::uint32_t row_bytes()
{
    std::uint32_t sum = 0;
    for (const column &c : columns_with_heads(0, kv_heads))
        sum += c.bytes;
    return sum;
}

prompt::prompt(std::uint32_t tokens, std::uint32_t shared, std::uint32_t seed)
{
    std::uint64_t state = 0;
    for (std::uint32_t p = 0; p < tokens; p++) {
        std::uint32_t stream = p < shared ? 0 : seed;
        tokens_.push_back(static_cast<std::uint32_t>(mix(p + (std::uint64_t{stream} << 32)) % 150000));
        state = mix(state + tokens_.back() + 1);
        state_.push_back(state);
    }
}

void prompt::compute(const column &c, std::uint32_t token, unsigned char *out) const
{
    std::uint64_t seed = state_.at(c.draft ? token + 1 : token) ^ c.id();
    for (std::uint32_t at = 0; at < c.bytes; at += 8) {
        std::uint64_t word = mix(seed + at);
        std::memcpy(out + at, &word, c.bytes - at < 8 ? c.bytes - at : 8);
    }
}

} // namespace engine
