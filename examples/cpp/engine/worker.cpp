#include "worker.hpp"

#include <algorithm>
#include <chrono>
#include <poll.h>

namespace engine {
namespace {

std::string describe(const setting &s, std::uint32_t rank)
{
    auto number = [](const char *key, std::uint32_t value) { return std::string(", \"") + key + "\": " + std::to_string(value); };
    std::string json = "{\"group\": \"" + s.group + "\", \"model\": \"example-engine\", \"kv_dtype\": \"uint8\", \"draft\": \"one layer\"";
    json += number("ranks", s.shape.tp) + number("rank", rank) + number("num_blocks", s.blocks);
    json += number("chunk_tokens", chunk_tokens) + number("block_tokens", block_tokens);
    json += number("dcp", s.shape.d) + number("dcp_rank", s.shape.dcp_rank(rank)) + number("interleave", s.shape.i);
    if (rank == 0)
        json += ", \"weights\": \"c0ffee\"";
    return json + ", \"provenance\": {\"topology\": \"" + s.shape.text() + "\"}}";
}

// The completion of a load, waited for behind the eventfd.
kvt_event wait_for_event(kvtier::cache &cache)
{
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
    pollfd p{-1, POLLIN, 0};
    kvtier::check(kvt_eventfd(cache.get(), &p.fd));
    while (std::chrono::steady_clock::now() < end) {
        if (auto e = cache.poll())
            return *e;
        // It is readable for log records, too, until they are taken.
        kvt_record records[16];
        std::size_t n = 0;
        kvtier::check(kvt_log_poll(cache.get(), records, 16, &n));
        poll(&p, 1, 1000);
    }
    throw std::runtime_error("a load does not end");
}

} // namespace

kvtier::cache open_cache(const setting &s, std::uint32_t rank)
{
    kvtier::cache cache("{\"disk_path\": \"" + s.root + "\", \"dram_gib\": 0.125, \"disk_gib\": 1, \"free_floor_gib\": 0, \"role\": \"" +
                        (rank == 0 ? "auto" : "member") + "\"}");
    if (!cache.wait_open(patience_ms))
        throw std::runtime_error("the cache did not open: " + cache.state().second);
    return cache;
}

worker::worker(kvtier::cache &cache, const setting &s, std::uint32_t rank)
    : cache_(cache), shape_(s.shape), pages_(s.shape, rank, s.blocks), rank_(cache.get(), describe(s, rank), pages_.regions())
{
}

void worker::ready()
{
    rank_.ready(patience_ms);
    if (!rank_.selftest(true, 60000))
        throw std::runtime_error("the self-test of the cache did not end in time");
}

outcome worker::carry_out(const plan &p)
{
    outcome out;
    try {
        const prompt text = p.prompt.make();
        if (p.what == step::forward)
            pages_.fill(text, p.table, p.first, p.end);
        if (p.what == step::load)
            pages_.wipe();
        if (p.spoil != plan::no_token)
            pages_.spoil(p.table, p.spoil);
        auto start = std::chrono::steady_clock::now();
        if (p.what == step::store)
            store(p);
        else if (p.what == step::load)
            load(p);
        out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (p.what == step::load)
            out.found = pages_.compare(text, p.table, p.first, p.end);
    } catch (const std::exception &e) {
        out.error = e.what();
    }
    return out;
}

void worker::store(const plan &p)
{
    auto op = kvtier::make<kvt_store_op>();
    std::uint32_t v = shape_.virtual_block(), first = p.first_ordinal * chunk_tokens / v;
    op.op = p.op;
    op.session = p.session;
    op.first_ordinal = p.first_ordinal;
    op.grants = p.grants.data();
    op.ngrants = p.grants.size();
    op.blocks = &p.table.at(first);
    op.nblocks = p.table.size() - first;
    if (!rank_.store(op))
        throw std::runtime_error("the grants are of another leader");
}

void worker::load(const plan &p)
{
    auto op = kvtier::make<kvt_load_op>();
    std::uint32_t v = shape_.virtual_block();
    op.op = p.op;
    op.session = p.session;
    op.first_token = p.first;
    op.tokens = p.end - p.first;
    op.nchunks = (p.end + chunk_tokens - 1) / chunk_tokens - p.first / chunk_tokens;
    op.blocks = &p.table.at(p.first / v);
    op.nblocks = (p.end + v - 1) / v - p.first / v;
    op.verdicts = p.verdicts.data();
    op.nverdicts = p.verdicts.size();
    rank_.load(op);
    kvt_event e = wait_for_event(cache_);
    if (e.op != p.op || e.status != KVT_OK)
        throw std::runtime_error("a load ended with " + std::string(kvt_strerror(e.status)) + " after " + std::to_string(e.tokens) + " tokens");
}

void serve(const setting &s, std::uint32_t rank, const channel &coordinator)
{
    kvtier::cache cache = open_cache(s, rank);
    worker w(cache, s, rank);
    w.ready();
    for (;;) {
        message in = coordinator.receive(-1), out;
        w.carry_out(plan::read(in)).write(out);
        coordinator.send(out);
    }
}

} // namespace engine
