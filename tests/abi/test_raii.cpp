// The C++ header: ownership, exceptions, and a round trip over a restart.
#include "kvtier.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <numeric>
#include <thread>
#include <type_traits>

namespace {

namespace fs = std::filesystem;

static_assert(!std::is_copy_constructible_v<kvtier::cache>);
static_assert(std::is_nothrow_move_constructible_v<kvtier::cache>);
static_assert(std::is_nothrow_move_assignable_v<kvtier::blob>);

class Raii : public ::testing::Test {
protected:
    void SetUp() override
    {
        std::string name = (fs::temp_directory_path() / "kvtier-raii-XXXXXX").string();
        ASSERT_NE(mkdtemp(name.data()), nullptr);
        dir_ = name;
    }
    void TearDown() override { fs::remove_all(dir_); }

    kvtier::cache open(const std::string &role = "auto")
    {
        kvtier::cache c(R"({"disk_path": ")" + (dir_ / "kv").string() +
                        R"(", "dram_gib": 0.0625, "disk_gib": 0.25, "free_floor_gib": 0, "role": ")" + role + "\"}");
        return c;
    }

    fs::path dir_;
};

constexpr std::size_t chunk_bytes = 8192;
constexpr std::uint32_t chunk_tokens = 32;
const char *const model = R"({"model": "m", "chunk_bytes": 8192, "chunk_tokens": 32})";

std::vector<std::uint8_t> payload(std::size_t i)
{
    std::vector<std::uint8_t> p(chunk_bytes);
    for (std::size_t at = 0; at < p.size(); at++)
        p[at] = static_cast<std::uint8_t>(at * 7 + at / 256 + i * 13);
    return p;
}

std::vector<kvtier::key> some_keys(const std::array<std::uint8_t, 32> &fingerprint)
{
    std::vector<std::uint32_t> tokens(5 * chunk_tokens + 3);
    std::iota(tokens.begin(), tokens.end(), 100u);
    return kvtier::keys(kvtier::root(fingerprint), chunk_tokens, tokens.data(), tokens.size());
}

TEST_F(Raii, RoundTripOverARestart)
{
    {
        auto cache = open();
        ASSERT_TRUE(cache.wait_open(10000));
        kvtier::blob blob(cache.get(), model);
        auto keys = some_keys(blob.ready(10000));
        ASSERT_EQ(keys.size(), 5u);
        std::vector<std::uint8_t> back(chunk_bytes);
        EXPECT_FALSE(blob.get(keys[0], back.data(), back.size()));
        for (std::size_t i = 0; i < keys.size(); i++) {
            auto p = payload(i);
            EXPECT_TRUE(blob.put(keys[i], i == 0 ? nullptr : &keys[i - 1], static_cast<std::uint32_t>(i), p.data(), p.size()));
        }
        EXPECT_EQ(blob.lookup(keys), std::make_pair(5u, 5u));
        EXPECT_TRUE(cache.flush(10000));
        EXPECT_EQ(cache.stats().front(), '{');
        EXPECT_EQ(cache.state().first, KVT_STATE_LEADER);
        EXPECT_FALSE(cache.poll().has_value());
    } // closed by the destructors
    auto cache = open();
    ASSERT_TRUE(cache.wait_open(10000));
    {
        kvtier::blob blob(cache.get(), model);
        auto keys = some_keys(blob.ready(10000));
        EXPECT_EQ(blob.lookup(keys).first, 5u);
        for (std::size_t i = 0; i < keys.size(); i++) {
            std::vector<std::uint8_t> back(chunk_bytes);
            ASSERT_TRUE(blob.get(keys[i], back.data(), back.size(), 5000));
            EXPECT_EQ(back, payload(i));
        }
        blob.remove({keys[4]});
        EXPECT_EQ(blob.lookup(keys).first, 4u);
    }
    EXPECT_TRUE(cache.close(10000));
    EXPECT_EQ(cache.get(), 0u);
}

TEST_F(Raii, ErrorsCarryCodeAndSentence)
{
    try {
        kvtier::cache c(R"({"dram_gibs": 1})");
        FAIL() << "no exception";
    } catch (const kvtier::error &e) {
        EXPECT_EQ(e.code(), KVT_E_CONFIG);
        EXPECT_NE(std::strstr(e.what(), "dram_gib\""), nullptr) << e.what();
    }
    auto cache = open();
    EXPECT_THROW(kvtier::blob(cache.get(), "{}"), kvtier::error);
    EXPECT_THROW(kvtier::coordinator(cache.get(), "", 1), kvtier::error);
    EXPECT_THROW(kvtier::rank(cache.get(), "{}", {}), kvtier::error);
}

TEST_F(Raii, MovingLeavesOneOwner)
{
    auto a = open();
    auto handle = a.get();
    kvtier::cache b(std::move(a));
    EXPECT_EQ(a.get(), 0u);
    EXPECT_EQ(b.get(), handle);
    b = open("member"); // the first one is closed: its handle is dead
    std::int32_t state = 0;
    EXPECT_EQ(kvt_state(handle, &state, nullptr, 0), KVT_E_HANDLE);
    EXPECT_EQ(kvt_state(b.get(), &state, nullptr, 0), KVT_OK);
}

TEST_F(Raii, TheMessageIsOfTheThread)
{
    EXPECT_EQ(kvt_open("{\"x\": 1}", 8, nullptr), KVT_E_ARG);
    std::thread([] { EXPECT_EQ(kvt_last_error(nullptr, 0), 0u); }).join();
    EXPECT_GT(kvt_last_error(nullptr, 0), 0u);
}

} // namespace
