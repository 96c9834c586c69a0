// The engine of examples/cpp: its arithmetic, and whole runs of it.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <set>
#include <sys/wait.h>

#include "channel.hpp"
#include "model.hpp"
#include "pages.hpp"

namespace {

using namespace engine;

struct ran {
    int status;
    std::string output;
};

// Runs the engine; what it says on both streams.
ran run(const std::string &arguments)
{
    ran out{-1, ""};
    FILE *pipe = popen((std::string(ENGINE_PROGRAM) + " " + arguments + " 2>&1").c_str(), "r");
    if (pipe == nullptr)
        return out;
    std::array<char, 4096> part{};
    while (fgets(part.data(), part.size(), pipe) != nullptr)
        out.output += part.data();
    int status = pclose(pipe);
    out.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return out;
}

int count(const std::string &text, const std::string &what)
{
    int n = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1))
        n++;
    return n;
}

// Eight lives, of 1 to 8 ranks; each loads what all before it stored, and stores more.
TEST(Engine, LoadsUnderOtherTopologiesWhatItStored)
{
    ran r = run("--json engine_test.json");
    EXPECT_EQ(r.status, 0) << r.output;
    for (const char *line : {"D4,I1,TP4    -> D2,I1,TP2     11 chunks, every byte equal", "D4,I1,TP4    -> D8,I64,TP8    11 chunks, every byte equal",
                             "D8,I64,TP8   -> D4,I64,TP8     2 chunks, every byte equal", "D8,I64,TP8   -> D2,I16,TP4     2 chunks, every byte equal"})
        EXPECT_NE(r.output.find(line), std::string::npos) << line << " is not in\n" << r.output;
    FILE *json = fopen("engine_test.json", "r");
    ASSERT_NE(json, nullptr);
    std::string text(1 << 16, '\0');
    text.resize(fread(text.data(), 1, text.size(), json));
    fclose(json);
    std::remove("engine_test.json");
    EXPECT_EQ(count(text, R"("bytes_equal": true)"), 8 * 7 / 2) << text;
    EXPECT_EQ(count(text, R"("bytes_equal": false)"), 0) << text;
    EXPECT_NE(text.find(R"({"from": {"D": 8, "I": 64, "TP": 8}, "to": {"D": 2, "I": 16, "TP": 4}, "chunks": 2, "bytes_equal": true})"),
              std::string::npos)
        << text;
}

// One byte that goes wrong before it is stored comes back wrong, with a good checksum:
// only the comparison can find it.
TEST(Engine, FindsOneWrongByte)
{
    ran r = run("--json engine_wrong.json --spoil 300 D2,I1,TP2 D1,I1,TP1");
    std::remove("engine_wrong.json");
    EXPECT_EQ(r.status, 1) << r.output;
    EXPECT_NE(r.output.find("D2,I1,TP2    -> D1,I1,TP1     11 chunks, BYTES DIFFER"), std::string::npos) << r.output;
    EXPECT_NE(r.output.find("D1,I1,TP1, prompt 1: 2 wrong bytes in two loads; the first: rank 0, kv of layer 0, token 300, byte 328"),
              std::string::npos)
        << r.output;
}

TEST(Engine, NamesWhatItCannotRun)
{
    for (const char *t : {"D3,I1,TP4", "D4,I3,TP4", "D4,I1,TP2", "D1,I1,TP3", "D1,I1,TP32", "D0,I1,TP1", "D1,I0,TP1", "D1,I1,TP1x", "4"}) {
        ran r = run(t);
        EXPECT_EQ(r.status, 2) << t;
        EXPECT_NE(r.output.find(std::string("not a topology: ") + t), std::string::npos) << r.output;
    }
    EXPECT_EQ(run("--json").status, 2);
}

TEST(Topology, EveryTokenHasOnePlace)
{
    for (std::uint32_t d : {1u, 2u, 4u, 8u})
        for (std::uint32_t i : {1u, 16u, 64u}) {
            topology t{d, i, d};
            std::vector<std::uint32_t> held(d);
            for (std::uint32_t token = 0; token < 3 * t.virtual_block(); token++) {
                // Ranks take turns, i tokens each; a rank's tokens fill its blocks in order.
                topology::place p = t.locate(token);
                ASSERT_EQ(p.rank, token / i % d);
                ASSERT_EQ(p.block * block_tokens + p.local, held[p.rank]++);
                ASSERT_EQ(p.block, token / (block_tokens * d));
            }
        }
}

TEST(Topology, EveryDCPRankHasEveryHead)
{
    for (const char *text : {"D1,I1,TP1", "D1,I1,TP2", "D1,I1,TP4", "D1,I1,TP8", "D2,I1,TP4", "D2,I1,TP16", "D4,I1,TP4", "D4,I1,TP8"}) {
        topology t = parse_topology(text).value();
        std::multiset<std::pair<std::uint32_t, std::uint32_t>> held; // DCP rank, head
        for (std::uint32_t rank = 0; rank < t.tp; rank++)
            for (std::uint32_t h = 0; h < t.head_count(); h++)
                held.emplace(t.dcp_rank(rank), t.first_head(rank) + h);
        for (std::uint32_t d = 0; d < t.d; d++)
            for (std::uint32_t h = 0; h < kv_heads; h++) {
                EXPECT_GE(held.count({d, h}), 1u) << text;
                EXPECT_EQ(held.count({d, h}) > 1, t.heads_replicated()) << text;
            }
        EXPECT_EQ(held.size(), t.tp * t.head_count());
    }
}

TEST(Prompt, OnlyTheDraftLayerLooksAhead)
{
    prompt a(300, 256, 1), b(300, 256, 2);
    std::vector<unsigned char> x(128), y(128);
    column target{"kv", false, 0, 0, 128, false}, draft{"kv", true, 0, 0, 128, false};
    a.compute(target, 255, x.data());
    b.compute(target, 255, y.data());
    EXPECT_EQ(x, y);
    a.compute(draft, 254, x.data());
    b.compute(draft, 254, y.data());
    EXPECT_EQ(x, y);
    a.compute(draft, 255, x.data());
    b.compute(draft, 255, y.data());
    EXPECT_NE(x, y);
}

TEST(Pages, ComparisonSeesEveryByte)
{
    topology t{2, 16, 2};
    prompt text(300, 0, 1);
    std::vector<std::uint32_t> table{2, 0, 1};
    pages p(t, 1, 4);
    p.fill(text, table, 20, 280);
    finding good = p.compare(text, table, 20, 280);
    EXPECT_EQ(good.wrong, (std::vector<std::uint64_t>{0, 0}));
    EXPECT_EQ(good.touched, 0u);
    EXPECT_GT(good.checked, 0u);
    finding wide = p.compare(text, table, 21, 280); // token 20 is rank 1's
    EXPECT_GT(wide.touched, 0u);
    p.spoil(table, 0); // rank 0's
    EXPECT_EQ(p.compare(text, table, 20, 280).wrong[0], 0u);
    p.spoil(table, 272);
    finding bad = p.compare(text, table, 20, 280);
    EXPECT_EQ(bad.wrong, (std::vector<std::uint64_t>{0, 1}));
    EXPECT_NE(bad.first.find("token 272"), std::string::npos) << bad.first;
}

TEST(Message, EndsWhereItEnds)
{
    message m;
    m.put(std::uint32_t{7}).put_all(std::string("abc"));
    std::uint32_t n = 0;
    std::string text;
    m.get(n).get_all(text);
    EXPECT_EQ(n, 7u);
    EXPECT_EQ(text, "abc");
    EXPECT_THROW(m.get(n), std::runtime_error);
    message lies;
    lies.put(std::uint32_t{1000000});
    EXPECT_THROW(lies.get_all(text), std::runtime_error);
}

} // namespace
