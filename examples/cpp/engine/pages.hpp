// One rank's pages: the memory of its KV cache.
#ifndef ENGINE_PAGES_HPP
#define ENGINE_PAGES_HPP

#include <cstdint>
#include <string>
#include <vector>

#include "kvtier.h"
#include "model.hpp"

namespace engine {

// What a rank found when it compared its pages.
struct finding {
    std::uint64_t checked = 0;           // bytes that had to hold something
    std::vector<std::uint64_t> wrong;    // bytes, by chunk
    std::uint64_t touched = 0;           // bytes outside the range that changed
    std::string first;                   // the first wrong byte, in words
};

class pages {
public:
    pages(const topology &t, std::uint32_t rank, std::uint32_t blocks);
    pages(const pages &) = delete;
    pages &operator=(const pages &) = delete;

    // Descriptions for kvt_register. They point into this object.
    std::vector<kvt_region> regions() const;

    void wipe();
    // What a forward pass over the tokens [first, end) leaves behind. table[vb] is the
    // block of the prompt's virtual block vb.
    void fill(const prompt &p, const std::vector<std::uint32_t> &table, std::uint32_t first, std::uint32_t end);
    // Makes one byte of a token wrong, if this rank has it.
    void spoil(const std::vector<std::uint32_t> &table, std::uint32_t token);
    // Compares every byte of the memory, which was wiped before, to what has to be
    // there after a load of the tokens [first, end): nothing else may have changed.
    finding compare(const prompt &p, const std::vector<std::uint32_t> &table, std::uint32_t first, std::uint32_t end) const;

private:
    // A tensor of the engine. Several columns may lie in one: the two of an indexer's
    // page, the heads of a layer.
    struct cache {
        std::size_t block_bytes = 0;
        std::vector<unsigned char> memory;
    };
    struct placed {
        column what;
        std::size_t cache, at, token_stride;
    };

    // Where a token of a column begins in its cache, if this rank has it.
    bool find(const placed &c, const std::vector<std::uint32_t> &table, std::uint32_t token, std::size_t *at) const;
    finding explain(const pages &want, const std::vector<std::uint32_t> &table, std::uint32_t first, std::uint32_t end) const;

    topology topology_;
    std::uint32_t rank_, blocks_;
    std::vector<cache> caches_;
    std::vector<placed> columns_;
};

} // namespace engine

#endif
