// kvtier.hpp - kvtier.h for C++17: ownership of handles, codes as exceptions.
//
// Thin on purpose: every class holds one handle, closes it when it is destroyed,
// and shows the handle (get()) for the C functions that have no method here. What
// a call means is written in kvtier.h.
//
// A miss is no exception. Misses and declines are bool or std::optional.
#ifndef KVTIER_HPP
#define KVTIER_HPP

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvtier.h"

namespace kvtier {

using key = kvt_key;

// A code and the sentence that belongs to it.
class error : public std::runtime_error {
public:
    error(std::int32_t code, const std::string &what) : std::runtime_error(what), code_(code) {}
    std::int32_t code() const noexcept { return code_; }

private:
    std::int32_t code_;
};

// Throws unless code is KVT_OK; code was just returned to this thread.
inline void check(std::int32_t code)
{
    if (code == KVT_OK)
        return;
    std::string text(kvt_last_error(nullptr, 0), '\0');
    kvt_last_error(text.data(), text.size() + 1);
    throw error(code, text.empty() ? kvt_strerror(code) : text);
}

// A struct with struct_size set.
template <class T> T make()
{
    T t;
    KVT_INIT(t);
    return t;
}

namespace detail {

// One handle, closed once. Close must not fail in a way that matters to a
// destructor: who has to know calls close() itself.
template <std::int32_t (*Close)(std::uint64_t)> class handle {
public:
    handle() = default;
    explicit handle(std::uint64_t value) : value_(value) {}
    handle(handle &&other) noexcept : value_(std::exchange(other.value_, 0)) {}
    handle &operator=(handle &&other) noexcept
    {
        if (this != &other) {
            reset();
            value_ = std::exchange(other.value_, 0);
        }
        return *this;
    }
    ~handle() { reset(); }

    std::uint64_t get() const noexcept { return value_; }
    std::uint64_t release() noexcept { return std::exchange(value_, 0); }

private:
    void reset() noexcept
    {
        if (value_ != 0)
            Close(std::exchange(value_, 0));
    }
    std::uint64_t value_ = 0;
};

inline std::int32_t close_cache(std::uint64_t h) { return kvt_close(h, 10000); }
inline std::int32_t close_rank(std::uint64_t h)
{
    // Its pages may go away with the caller's next line.
    std::int32_t code = kvt_unregister(h, 10000);
    return code;
}

inline bool is_miss(std::int32_t code)
{
    return code == KVT_E_MISS || code == KVT_E_DECLINED || code == KVT_E_BUSY || code == KVT_E_TIMEOUT ||
           code == KVT_E_NO_LEADER;
}

} // namespace detail

// The parent of the first chunk of all prefixes with these extras.
inline key root(const std::array<std::uint8_t, 32> &fingerprint, const std::vector<kvt_extra> &extras = {})
{
    key out;
    check(kvt_key_root(fingerprint.data(), extras.data(), extras.size(), &out));
    return out;
}

// The keys of all full chunks of tokens, the first of which follows parent.
inline std::vector<key> keys(const key &parent, std::uint32_t chunk_tokens, const std::uint32_t *tokens, std::size_t n,
                             const std::vector<kvt_extra> &extras = {})
{
    std::vector<key> out(chunk_tokens == 0 ? 0 : n / chunk_tokens);
    std::size_t count = 0;
    check(kvt_keys(&parent, chunk_tokens, tokens, n, extras.data(), extras.size(), out.data(), out.size(), &count));
    out.resize(count);
    return out;
}

// Whole chunks in one buffer.
class blob {
public:
    blob(kvt_cache cache, std::string_view json) { open(cache, json); }

    std::uint64_t get() const noexcept { return handle_.get(); }

    // Waits until puts and gets can work; the fingerprint from which keys begin.
    std::array<std::uint8_t, 32> ready(std::int64_t timeout_ms)
    {
        std::array<std::uint8_t, 32> out{};
        check(kvt_blob_ready(handle_.get(), timeout_ms, out.data()));
        return out;
    }

    // True: held now. False: declined, which is no error. parent: null for ordinal 0.
    bool put(const key &k, const key *parent, std::uint32_t ordinal, const void *payload, std::size_t bytes,
             std::int64_t timeout_ms = 1000)
    {
        return held(kvt_put(handle_.get(), &k, parent, ordinal, payload, bytes, timeout_ms));
    }

    // True: buf holds the chunk. False: a miss, and buf holds anything.
    bool get(const key &k, void *buf, std::size_t bytes, std::int64_t timeout_ms = 1000)
    {
        return held(kvt_get(handle_.get(), &k, buf, bytes, timeout_ms));
    }

    // How many leading keys are held, and how many of them in DRAM.
    std::pair<std::uint32_t, std::uint32_t> lookup(const std::vector<key> &ks)
    {
        std::uint32_t all = 0, resident = 0;
        if (!held(kvt_lookup(handle_.get(), ks.data(), ks.size(), &all, &resident)))
            return {0, 0};
        return {all, resident};
    }

    void remove(const std::vector<key> &ks) { check(kvt_remove(handle_.get(), ks.data(), ks.size())); }

private:
    void open(kvt_cache cache, std::string_view json)
    {
        kvt_blob h = 0;
        check(kvt_blob_open(cache, json.data(), json.size(), &h));
        handle_ = detail::handle<kvt_blob_close>(h);
    }
    static bool held(std::int32_t code)
    {
        if (detail::is_miss(code))
            return false;
        check(code);
        return true;
    }
    detail::handle<kvt_blob_close> handle_;
};

// The coordinator of a group of ranks. For leases and plans use kvt_* with get().
class coordinator {
public:
    coordinator(kvt_cache cache, const std::string &group, std::uint32_t ranks)
    {
        kvt_coord h = 0;
        check(kvt_coordinate(cache, group.c_str(), ranks, &h));
        handle_ = detail::handle<kvt_coord_close>(h);
    }
    std::uint64_t get() const noexcept { return handle_.get(); }

    kvt_accepted ready(std::int64_t timeout_ms)
    {
        auto out = make<kvt_accepted>();
        check(kvt_coord_ready(handle_.get(), timeout_ms, &out));
        return out;
    }

private:
    detail::handle<kvt_coord_close> handle_;
};

// A rank of a group. Its pages must outlive it.
class rank {
public:
    rank(kvt_cache cache, std::string_view json, const std::vector<kvt_region> &regions)
    {
        kvt_rank h = 0;
        check(kvt_register(cache, json.data(), json.size(), regions.data(), regions.size(), &h));
        handle_ = detail::handle<detail::close_rank>(h);
    }
    std::uint64_t get() const noexcept { return handle_.get(); }

    kvt_accepted ready(std::int64_t timeout_ms)
    {
        auto out = make<kvt_accepted>();
        check(kvt_rank_ready(handle_.get(), timeout_ms, &out));
        return out;
    }

    // Proves that what the ranks of the group store comes back. All of them call it,
    // before the first request. False: not all ranks came in time, nothing is proven.
    // Throws an error with KVT_E_SELFTEST when bytes came back wrong.
    bool selftest(bool pages, std::uint32_t timeout_ms)
    {
        std::int32_t code = kvt_selftest(handle_.get(), pages ? KVT_SELFTEST_PAGES : 0, timeout_ms);
        if (code == KVT_E_TIMEOUT)
            return false;
        check(code);
        return true;
    }

    // False: of another leader session, nothing was done.
    bool store(const kvt_store_op &op)
    {
        std::int32_t code = kvt_store(handle_.get(), &op);
        if (code == KVT_E_STALE)
            return false;
        check(code);
        return true;
    }

    void load(const kvt_load_op &op) { check(kvt_load(handle_.get(), &op)); }

private:
    detail::handle<detail::close_rank> handle_;
};

// A cache. Destroy what was made of it first.
class cache {
public:
    // Returns at once; everything is a miss until wait_open says true.
    explicit cache(std::string_view json)
    {
        kvt_cache h = 0;
        check(kvt_open(json.data(), json.size(), &h));
        handle_ = detail::handle<detail::close_cache>(h);
    }
    std::uint64_t get() const noexcept { return handle_.get(); }

    bool wait_open(std::int64_t timeout_ms) { return reached(kvt_wait_open(handle_.get(), timeout_ms)); }
    bool flush(std::int64_t timeout_ms) { return reached(kvt_flush(handle_.get(), timeout_ms)); }

    // KVT_STATE_* and a line for people.
    std::pair<std::int32_t, std::string> state() const
    {
        std::int32_t s = 0;
        char detail[512];
        check(kvt_state(handle_.get(), &s, detail, sizeof detail));
        return {s, detail};
    }

    // Statistics as JSON.
    std::string stats() const
    {
        std::string text(1 << 14, '\0');
        for (;;) {
            std::size_t need = 0;
            std::int32_t code = kvt_stats(handle_.get(), text.data(), text.size(), &need);
            if (code == KVT_OK) {
                text.resize(need - 1);
                return text;
            }
            if (code != KVT_E_BUFFER)
                check(code);
            text.resize(2 * need);
        }
    }

    // A completion, if there is one.
    std::optional<kvt_event> poll()
    {
        kvt_event e;
        std::size_t n = 0;
        check(kvt_poll(handle_.get(), &e, 1, &n));
        return n == 1 ? std::optional<kvt_event>(e) : std::nullopt;
    }

    // Closes now and says whether all was written out in time.
    bool close(std::int64_t timeout_ms) { return reached(kvt_close(handle_.release(), timeout_ms)); }

private:
    static bool reached(std::int32_t code)
    {
        if (code == KVT_E_TIMEOUT)
            return false;
        check(code);
        return true;
    }
    detail::handle<detail::close_cache> handle_;
};

} // namespace kvtier

#endif
