#include "pages.hpp"

#include <algorithm>
#include <cstring>

#include "kvtier.hpp"

namespace engine {
namespace {

constexpr unsigned char untouched = 0xee;

} // namespace

pages::pages(const topology &t, std::uint32_t rank, std::uint32_t blocks) : topology_(t), rank_(rank), blocks_(blocks)
{
    std::vector<column> columns = columns_of(t, rank);
    for (std::size_t n = 0; n < columns.size();) {
        const column &c = columns[n];
        // Pages that every rank has whole hold all tokens of their block id.
        std::size_t tokens = c.all_rows ? t.virtual_block() : block_tokens;
        std::size_t at = 0;
        if (c.head >= 0) {
            // Token-major: all heads of a token lie together.
            std::size_t heads = t.head_count();
            for (std::size_t h = 0; h < heads; h++, at += c.bytes)
                columns_.push_back({columns[n + h], caches_.size(), at, heads * c.bytes});
            n += heads;
            at *= tokens;
        } else {
            // An indexer's page is all values, then all scales.
            std::size_t members = c.name == "indexer" ? 2 : 1;
            for (std::size_t end = n + members; n < end; n++) {
                columns_.push_back({columns[n], caches_.size(), at, columns[n].bytes});
                at += tokens * columns[n].bytes;
            }
        }
        caches_.push_back({at, std::vector<unsigned char>(at * blocks, untouched)});
    }
}

std::vector<kvt_region> pages::regions() const
{
    std::vector<kvt_region> out;
    for (const placed &c : columns_) {
        auto r = kvtier::make<kvt_region>();
        std::strcpy(r.name, c.what.name.c_str());
        std::strcpy(r.component, c.what.draft ? "draft" : "target");
        r.layer = c.what.layer;
        r.head = c.what.head;
        r.bytes = c.what.bytes;
        bool replicated = c.what.head >= 0 ? topology_.heads_replicated() : topology_.latent_replicated();
        r.flags = (replicated ? KVT_REGION_REPLICATED : 0) | (c.what.all_rows ? KVT_REGION_ALL_ROWS : 0);
        const cache &memory = caches_[c.cache];
        r.base = const_cast<unsigned char *>(memory.memory.data()) + c.at;
        r.block_stride = static_cast<std::int64_t>(memory.block_bytes);
        r.token_stride = static_cast<std::int64_t>(c.token_stride);
        out.push_back(r);
    }
    return out;
}

void pages::wipe()
{
    for (cache &c : caches_)
        std::fill(c.memory.begin(), c.memory.end(), untouched);
}

bool pages::find(const placed &c, const std::vector<std::uint32_t> &table, std::uint32_t token, std::size_t *at) const
{
    topology::place where = topology_.locate(token);
    std::uint32_t local = where.local;
    if (c.what.all_rows)
        local = token % topology_.virtual_block();
    else if (where.rank != topology_.dcp_rank(rank_))
        return false;
    *at = table.at(where.block) * caches_[c.cache].block_bytes + c.at + local * c.token_stride;
    return true;
}

void pages::fill(const prompt &p, const std::vector<std::uint32_t> &table, std::uint32_t first, std::uint32_t end)
{
    std::size_t at;
    for (const placed &c : columns_)
        for (std::uint32_t token = first; token < end; token++)
            if (find(c, table, token, &at))
                p.compute(c.what, token, &caches_[c.cache].memory[at]);
}

void pages::spoil(const std::vector<std::uint32_t> &table, std::uint32_t token)
{
    std::size_t at;
    if (find(columns_.front(), table, token, &at))
        caches_[columns_.front().cache].memory[at + columns_.front().what.bytes / 2] ^= 1;
}

finding pages::compare(const prompt &p, const std::vector<std::uint32_t> &table, std::uint32_t first, std::uint32_t end) const
{
    pages want(topology_, rank_, blocks_);
    want.fill(p, table, first, end);
    return explain(want, table, first, end);
}

finding pages::explain(const pages &want, const std::vector<std::uint32_t> &table, std::uint32_t first, std::uint32_t end) const
{
    finding out;
    out.wrong.resize((end + chunk_tokens - 1) / chunk_tokens);
    std::uint64_t inside = 0, all = 0;
    for (const placed &c : columns_) {
        const unsigned char *have = caches_[c.cache].memory.data(), *right = want.caches_[c.cache].memory.data();
        for (std::uint32_t token = first; token < end; token++) {
            std::size_t at;
            if (!find(c, table, token, &at))
                continue;
            out.checked += c.what.bytes;
            if (std::memcmp(have + at, right + at, c.what.bytes) == 0)
                continue;
            for (std::size_t b = at; b < at + c.what.bytes; b++) {
                if (have[b] == right[b])
                    continue;
                if (inside++ == 0)
                    out.first = "rank " + std::to_string(rank_) + ", " + c.what.text() + ", token " + std::to_string(token) +
                                ", byte " + std::to_string(b - at) + ": " + std::to_string(have[b]) + " instead of " +
                                std::to_string(right[b]);
                out.wrong[token / chunk_tokens]++;
            }
        }
    }
    for (std::size_t n = 0; n < caches_.size(); n++)
        for (std::size_t b = 0; b < caches_[n].memory.size(); b++)
            all += caches_[n].memory[b] != want.caches_[n].memory[b];
    out.touched = all - inside;
    return out;
}

} // namespace engine
