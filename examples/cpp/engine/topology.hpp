// How the engine's ranks share the KV cache.
#ifndef ENGINE_TOPOLOGY_HPP
#define ENGINE_TOPOLOGY_HPP

#include <cstdint>
#include <optional>
#include <string>

namespace engine {

constexpr std::uint32_t chunk_tokens = 256; // C: what the cache keeps as one
constexpr std::uint32_t block_tokens = 64;  // B: a page, on one rank
constexpr std::uint32_t kv_heads = 4;       // of the draft layer

// D ranks share the tokens, I consecutive ones stay on one rank. TP ranks share the
// heads: TP / D groups, each of which has all tokens among its D ranks.
struct topology {
    std::uint32_t d = 1, i = 1, tp = 1;

    std::uint32_t virtual_block() const { return block_tokens * d; }
    std::uint32_t dcp_rank(std::uint32_t rank) const { return rank % d; }

    // Whether a latent lies on several ranks: all groups have all of it.
    bool latent_replicated() const { return tp > d; }

    // The KV heads of a rank: [first, first + count). With more groups than heads,
    // several groups have the same one.
    std::uint32_t head_count() const { return groups() < kv_heads ? kv_heads / groups() : 1; }
    std::uint32_t first_head(std::uint32_t rank) const
    {
        std::uint32_t group = rank / d;
        return groups() < kv_heads ? group * head_count() : group / (groups() / kv_heads);
    }
    bool heads_replicated() const { return groups() > kv_heads; }

    // Where a token lies: its virtual block, the DCP rank that has it, its place there.
    struct place {
        std::uint32_t block, rank, local;
    };
    place locate(std::uint32_t token) const
    {
        std::uint32_t o = token % virtual_block();
        return {token / virtual_block(), o / i % d, o / (d * i) * i + o % i};
    }

    std::string text() const
    {
        return "D" + std::to_string(d) + ",I" + std::to_string(i) + ",TP" + std::to_string(tp);
    }

private:
    std::uint32_t groups() const { return tp / d; }
};

// "D4,I16,TP8"; nothing for what no engine could run.
std::optional<topology> parse_topology(const std::string &text);

} // namespace engine

#endif
