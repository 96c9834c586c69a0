#include "planner.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

namespace engine {
namespace {

// until asks again and again, for as long as the slowest machine needs.
template <class Done> void until(const char *what, Done done)
{
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
    while (!done()) {
        if (std::chrono::steady_clock::now() > end)
            throw std::runtime_error(std::string(what) + ": waited too long");
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
}

} // namespace

planner::planner(kvtier::cache &cache, const setting &s, worker &own, const std::vector<channel> &peers)
    : cache_(cache), setting_(s), own_(own), peers_(peers), coordinator_(cache.get(), s.group, s.shape.tp)
{
}

void planner::start()
{
    kvt_accepted a = coordinator_.ready(patience_ms);
    std::array<std::uint8_t, 32> fingerprint{};
    std::copy(std::begin(a.fingerprint), std::end(a.fingerprint), fingerprint.begin());
    root_ = kvtier::root(fingerprint);
}

// The keys of the chunks whose next token is known. A draft layer's last row depends
// on it, so it is part of the key.
std::vector<kvtier::key> planner::keys_of(const prompt &p) const
{
    std::uint32_t chunks = (p.size() - 1) / chunk_tokens;
    std::vector<kvt_extra> successors(chunks);
    for (std::uint32_t i = 0; i < chunks; i++) {
        kvt_extra &e = successors[i];
        std::uint32_t next = p.tokens()[(i + 1) * chunk_tokens];
        e.chunk = i;
        e.kind = KVT_EXTRA_SUCCESSOR;
        e.length = 4;
        e.offset = chunk_tokens;
        for (int b = 0; b < 4; b++)
            e.bytes[b] = static_cast<std::uint8_t>(next >> (8 * b));
    }
    return kvtier::keys(root_, chunk_tokens, p.tokens(), std::size_t{chunks} * chunk_tokens, successors);
}

plan planner::make(step what, const prompt_spec &p) const
{
    plan out;
    out.what = what;
    out.prompt = p;
    // Any blocks in any order will do; the same for a prompt through a whole life.
    std::vector<std::uint32_t> ids(setting_.blocks);
    std::iota(ids.begin(), ids.end(), 0u);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(p.seed * 31 + setting_.shape.d));
    ids.resize((p.tokens + setting_.shape.virtual_block() - 1) / setting_.shape.virtual_block());
    out.table = ids;
    return out;
}

result planner::all_ranks(const plan &p)
{
    message m;
    p.write(m);
    for (const channel &c : peers_)
        c.send(m);
    std::vector<outcome> outcomes{own_.carry_out(p)};
    for (const channel &c : peers_) {
        message reply = c.receive(2 * patience_ms);
        outcomes.push_back(outcome::read(reply));
    }
    result out;
    out.found.wrong.resize((p.end + chunk_tokens - 1) / chunk_tokens);
    for (std::size_t rank = 0; rank < outcomes.size(); rank++) {
        const outcome &o = outcomes[rank];
        if (!o.error.empty())
            throw std::runtime_error("rank " + std::to_string(rank) + ": " + o.error);
        out.seconds = std::max(out.seconds, o.seconds);
        out.found.checked += o.found.checked;
        out.found.touched += o.found.touched;
        for (std::size_t i = 0; i < o.found.wrong.size(); i++)
            out.found.wrong.at(i) += o.found.wrong[i];
        if (out.found.first.empty())
            out.found.first = o.found.first;
    }
    return out;
}

std::uint32_t planner::look_up(const prompt_spec &p)
{
    std::vector<kvtier::key> keys = keys_of(p.make());
    std::uint64_t lease = next_++;
    std::uint32_t answer = 0;
    auto hits = kvtier::make<kvt_hits>();
    until("a lookup", [&] {
        std::int32_t code = kvt_lease(coordinator_.get(), lease, keys.data(), keys.size(), KVT_LEASE_PREFETCH | KVT_LEASE_PIN);
        if (code != KVT_E_BUSY)
            kvtier::check(code);
        code = kvt_lease_result(coordinator_.get(), lease, answer, 1000, &hits);
        if (code == KVT_E_PENDING)
            return false;
        kvtier::check(code);
        answer = hits.answer;
        return hits.pending == 0 && hits.resident == hits.held;
    });
    kvtier::check(kvt_release(coordinator_.get(), lease));
    return hits.held;
}

void planner::forward(const prompt_spec &p, std::uint32_t first, std::uint32_t end, std::uint32_t spoil)
{
    plan out = make(step::forward, p);
    out.first = first;
    out.end = end;
    out.spoil = spoil;
    all_ranks(out);
}

// A fresh arena grows behind its use: what is declined at first is asked for again.
void planner::grants(const std::vector<kvtier::key> &keys, std::uint32_t first, std::uint32_t end, plan *p)
{
    std::vector<kvt_verdict> verdicts(end - first);
    until("a store", [&] {
        auto req = kvtier::make<kvt_store_begin_req>();
        req.op = p->op = next_++;
        req.first_ordinal = first;
        req.parent = first == 0 ? root_ : keys[first - 1];
        req.keys = &keys[first];
        req.n = verdicts.size();
        req.verdicts = verdicts.data();
        kvtier::check(kvt_store_begin(coordinator_.get(), &req, 1, 5000, &p->session));
        if (req.status != KVT_OK)
            return false;
        p->grants.clear();
        bool complete = true;
        for (std::uint32_t i = 0; i < verdicts.size(); i++) {
            if (verdicts[i].code == KVT_GRANTED)
                p->grants.push_back({i, verdicts[i].slot, verdicts[i].generation, 0});
            else if (verdicts[i].code != KVT_HAVE)
                complete = false;
        }
        if (!complete) // no rank knows it yet
            kvtier::check(kvt_cancel(coordinator_.get(), p->op, KVT_CANCEL_UNSENT));
        return complete;
    });
}

result planner::store(const prompt_spec &p, std::uint32_t first, std::uint32_t end)
{
    plan out = make(step::store, p);
    out.first_ordinal = first;
    grants(keys_of(p.make()), first, end, &out);
    result r = all_ranks(out);
    // The chunks are visible when their checksums are taken, shortly after the last
    // rank's part is in. An engine need not wait; here the next lookup shall see them.
    until("a store", [&] { return look_up(p) >= end; });
    return r;
}

result planner::load(const prompt_spec &p, std::uint32_t first, std::uint32_t end)
{
    std::vector<kvtier::key> keys = keys_of(p.make());
    std::uint32_t chunk = first / chunk_tokens, chunks = (end + chunk_tokens - 1) / chunk_tokens - chunk;
    plan out = make(step::load, p);
    out.first = first;
    out.end = end;
    out.op = next_++;
    kvtier::check(kvt_lease(coordinator_.get(), out.op, keys.data(), chunk + chunks, KVT_LEASE_PREFETCH | KVT_LEASE_PIN));
    auto hits = kvtier::make<kvt_hits>();
    kvtier::check(kvt_lease_result(coordinator_.get(), out.op, 0, patience_ms, &hits));
    out.verdicts.resize(chunks);
    kvtier::check(kvt_load_begin(coordinator_.get(), out.op, out.op, chunk, &keys[chunk], chunks, patience_ms, out.verdicts.data(), &out.session));
    return all_ranks(out);
}

void planner::flush()
{
    if (!cache_.flush(patience_ms))
        throw std::runtime_error("the disk does not keep up");
}

} // namespace engine
