// The layers of the model, and the KV cache that it would compute.
#ifndef ENGINE_MODEL_HPP
#define ENGINE_MODEL_HPP

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "topology.hpp"

namespace engine {

// A column of the row: what one layer keeps of one token (of one head).
struct column {
    std::string name;
    bool draft;
    std::int32_t layer, head; // head -1: none
    std::uint32_t bytes;
    bool all_rows; // not spread over DCP: every rank has all tokens

    // Names the column in what depends on it; the same in every topology.
    std::uint64_t id() const;
    std::string text() const;
};

// Layers as in models with sparse attention: a latent of 656 bytes in each, an indexer
// in every second one, one layer of another width, one draft layer with KV heads.
// These are the columns of one rank.
std::vector<column> columns_of(const topology &t, std::uint32_t rank);

std::uint32_t row_bytes(); // of all columns

// A prompt, and the state that stands for everything a real model would have computed
// up to each of its tokens.
class prompt {
public:
    // The first `shared` tokens are those of every prompt, the others depend on seed.
    prompt(std::uint32_t tokens, std::uint32_t shared, std::uint32_t seed);

    std::uint32_t size() const { return static_cast<std::uint32_t>(tokens_.size()); }
    const std::uint32_t *tokens() const { return tokens_.data(); }

    // Writes what a column holds at a token. A draft layer looks one token ahead.
    void compute(const column &c, std::uint32_t token, unsigned char *out) const;

private:
    std::vector<std::uint32_t> tokens_;
    std::vector<std::uint64_t> state_;
};

} // namespace engine

#endif
