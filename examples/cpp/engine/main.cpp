// An engine of several rank processes that keeps its KV cache over kills, and under
// other topologies.
//
// It runs once per topology of the chain, always on the same cache directory. Each life
// loads what the earlier ones stored, compares every byte of its pages, stores some
// more, and is killed with SIGKILL.
//
//   engine [--json FILE] [--dir DIRECTORY] [--spoil TOKEN] [D4,I1,TP4 ...]
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <unistd.h>

#include "report.hpp"

namespace {

using namespace engine;

struct options {
    std::string json, directory;
    std::uint32_t spoil = plan::no_token;
    std::vector<topology> chain;
};

// DCP 4 to 2, 1 and back to 4 and 8; interleaves of 1, 16 and a block; more TP ranks
// than DCP ranks or KV heads.
constexpr const char *default_chain[] = {"D4,I1,TP4", "D2,I1,TP2",  "D1,I1,TP1",  "D4,I16,TP4",
                                         "D1,I1,TP8",  "D8,I64,TP8", "D4,I64,TP8", "D2,I16,TP4"};

constexpr std::uint32_t first_chunks = 6, more_chunks = 2, short_chunks = 5, shared_chunks = 3;

options parse(int argc, char **argv)
{
    options o;
    auto add = [&](const std::string &text) {
        auto t = parse_topology(text);
        if (!t)
            throw std::invalid_argument("not a topology: " + text + " (D ranks share the tokens, D divides TP; I divides " +
                                        std::to_string(block_tokens) + "; TP is a power of two, at most 16)");
        o.chain.push_back(*t);
    };
    for (int i = 1; i < argc; i++) {
        std::string arg = argv[i];
        bool option = arg == "--json" || arg == "--dir" || arg == "--spoil";
        if (option && ++i == argc)
            throw std::invalid_argument(arg + " needs a value");
        if (arg == "--json")
            o.json = argv[i];
        else if (arg == "--dir")
            o.directory = argv[i];
        else if (arg == "--spoil")
            o.spoil = static_cast<std::uint32_t>(std::stoul(argv[i]));
        else
            add(arg);
    }
    if (o.chain.empty())
        for (const char *text : default_chain)
            add(text);
    return o;
}

// A directory that is gone when the program ends.
class scratch {
public:
    explicit scratch(const std::string &wanted)
    {
        std::string name = (std::filesystem::temp_directory_path() / "kvtier-engine-XXXXXX").string();
        if (!wanted.empty())
            std::filesystem::create_directories(path_ = wanted);
        else if (mkdtemp(name.data()) != nullptr)
            path_ = temporary_ = name;
        else
            throw std::runtime_error("no temporary directory: " + name);
    }
    scratch(const scratch &) = delete;
    scratch &operator=(const scratch &) = delete;
    ~scratch()
    {
        std::error_code ignored;
        if (!temporary_.empty())
            std::filesystem::remove_all(temporary_, ignored);
    }
    const std::string &path() const { return path_; }

private:
    std::string path_, temporary_;
};

report run(const options &o, const std::string &root)
{
    report all;
    auto lives = static_cast<std::uint32_t>(o.chain.size());
    // Both end inside a block. The second one leaves the first at a border of chunks.
    std::vector<task> tasks(2);
    tasks[0].prompt = {(first_chunks + lives * more_chunks) * chunk_tokens + 77, shared_chunks * chunk_tokens, 1};
    tasks[1].prompt = {short_chunks * chunk_tokens + 101, shared_chunks * chunk_tokens, 2};
    tasks[1].until = short_chunks;
    std::vector<std::vector<std::size_t>> wrote(tasks.size());
    for (std::uint32_t n = 0; n < lives; n++) {
        tasks[0].until = n + 1 == lives && n > 0 ? 0 : first_chunks + n * more_chunks;
        tasks[0].spoil = n == 0 ? o.spoil : plan::no_token;
        setting s;
        s.shape = o.chain[n];
        s.root = root;
        s.group = "engine-" + std::to_string(getpid()) + "-" + std::to_string(n);
        s.blocks = (tasks[0].prompt.tokens + s.shape.virtual_block() - 1) / s.shape.virtual_block() + 5;
        chapter c;
        c.shape = s.shape;
        for (const auto &w : wrote)
            c.expected.push_back(static_cast<std::uint32_t>(w.size()));
        if (n == 0) // what both prompts begin with, but for the last chunk, whose successor differs
            c.expected[1] = shared_chunks - 1;
        {
            life engine(s, tasks);
            c.accounts = engine.run();
        } // killed
        for (std::size_t p = 0; p < tasks.size(); p++)
            if (wrote[p].size() < tasks[p].until)
                wrote[p].resize(tasks[p].until, n);
        c.wrote = wrote;
        all.add(c);
        all.print_newest(std::cout);
    }
    return all;
}

} // namespace

int main(int argc, char **argv)
{
    if (auto status = engine::run_as_rank(argc, argv))
        return *status;
    try {
        options o = parse(argc, argv);
        scratch directory(o.directory);
        report all = run(o, directory.path());
        all.print(std::cout);
        if (!o.json.empty() && !(std::ofstream(o.json) << all.json()))
            throw std::runtime_error("cannot write " + o.json);
        return all.complaints().empty() ? 0 : 1;
    } catch (const std::exception &e) {
        std::cerr << "engine: " << e.what() << "\n";
        return 2;
    }
}
