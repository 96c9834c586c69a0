#include "life.hpp"

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <iostream>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <system_error>
#include <unistd.h>

#include "planner.hpp"

namespace engine {
namespace {

constexpr const char *rank_mark = "--engine-rank";

// Bytes of the KV cache of so many chunks.
double bytes_of(std::uint32_t chunks) { return double(chunks) * chunk_tokens * row_bytes(); }

void add(const result &r, account *a)
{
    a->found.checked += r.found.checked;
    a->found.touched += r.found.touched;
    if (a->found.wrong.size() < r.found.wrong.size())
        a->found.wrong.resize(r.found.wrong.size());
    for (std::size_t i = 0; i < r.found.wrong.size(); i++)
        a->found.wrong[i] += r.found.wrong[i];
    if (a->found.first.empty())
        a->found.first = r.found.first;
}

account carry_out(planner &coordinator, const task &t)
{
    account a;
    a.held = coordinator.look_up(t.prompt);
    if (a.held > 0) {
        std::uint32_t end = a.held * chunk_tokens;
        // What the engine has of a prompt seldom ends at a border of chunks or blocks.
        add(coordinator.load(t.prompt, 37, end - 11), &a);
        result whole = coordinator.load(t.prompt, 0, end);
        add(whole, &a);
        a.loaded_bytes = bytes_of(a.held);
        a.load_seconds = whole.seconds;
    }
    // The last token's successor is not known, so that it has no row in a draft layer.
    coordinator.forward(t.prompt, a.held * chunk_tokens, t.prompt.tokens - 1, t.spoil);
    if (t.until > a.held) {
        a.stored_bytes = bytes_of(t.until - a.held);
        a.store_seconds = coordinator.store(t.prompt, a.held, t.until).seconds;
    }
    return a;
}

// Rank 0: one process is leader, rank and coordinator. It stays until it is killed.
void lead(const setting &s, const std::vector<task> &tasks, const std::vector<channel> &peers, const channel &reports)
{
    kvtier::cache cache = open_cache(s, 0);
    worker own(cache, s, 0);
    planner coordinator(cache, s, own, peers);
    coordinator.start();
    own.ready();
    message m;
    m.put_all(std::string()).put(static_cast<std::uint32_t>(tasks.size()));
    for (const task &t : tasks) {
        account a = carry_out(coordinator, t);
        m.put(a.held).put(a.found.checked).put(a.found.touched).put_all(a.found.wrong).put_all(a.found.first);
        m.put(a.loaded_bytes).put(a.load_seconds).put(a.stored_bytes).put(a.store_seconds);
    }
    coordinator.flush();
    reports.send(m);
    pause();
}

[[noreturn]] void start_rank(std::uint32_t rank, int fd)
{
    // Nobody shall be left when the program that started us is gone.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    fcntl(fd, F_SETFD, 0);
    std::string number = std::to_string(rank), socket = std::to_string(fd);
    execl("/proc/self/exe", "engine", rank_mark, number.c_str(), socket.c_str(), static_cast<char *>(nullptr));
    _exit(127);
}

// Descriptors cannot travel in a message of ours: rank 0 inherits its ends of all
// pairs, and is told their numbers.
message orders(const setting &s, const std::vector<task> &tasks, const std::vector<int> &peers)
{
    message m;
    m.put(s.shape).put_all(s.root).put_all(s.group).put(s.blocks).put_all(tasks).put_all(peers);
    return m;
}

} // namespace

life::life(const setting &s, const std::vector<task> &tasks)
{
    std::vector<channel> of_coordinator, ends; // of the pairs to the other ranks
    std::vector<int> peers;
    for (std::uint32_t rank = 1; rank < s.shape.tp; rank++) {
        auto [a, b] = channel::make();
        peers.push_back(a.fd());
        of_coordinator.push_back(std::move(a));
        ends.push_back(std::move(b));
    }
    auto [mine, its] = channel::make();
    for (std::uint32_t rank = 0; rank < s.shape.tp; rank++) {
        int fd = rank == 0 ? its.fd() : ends[rank - 1].fd();
        std::cout.flush();
        pid_t pid = fork();
        if (pid < 0) {
            int code = errno;
            kill();
            throw std::system_error(code, std::generic_category(), "fork");
        }
        if (pid == 0) {
            if (rank == 0)
                for (int inherited : peers)
                    fcntl(inherited, F_SETFD, 0);
            start_rank(rank, fd);
        }
        pids_.push_back(pid);
    }
    // Every rank reads first what it is there for: rank 0 from us, the others through
    // the pairs, before the coordinator begins to use them.
    mine.send(orders(s, tasks, peers));
    for (const channel &c : of_coordinator)
        c.send(orders(s, {}, {}));
    reports_ = std::move(mine);
}

std::vector<account> life::run()
{
    message m = reports_->receive(10 * patience_ms);
    std::string error;
    std::uint32_t n = 0;
    m.get_all(error);
    if (!error.empty())
        throw std::runtime_error(error);
    m.get(n);
    std::vector<account> out(n);
    for (account &a : out) {
        m.get(a.held).get(a.found.checked).get(a.found.touched).get_all(a.found.wrong).get_all(a.found.first);
        m.get(a.loaded_bytes).get(a.load_seconds).get(a.stored_bytes).get(a.store_seconds);
    }
    return out;
}

void life::kill() noexcept
{
    // The coordinator last, so that nobody has the time to complain that it is gone.
    for (auto pid = pids_.rbegin(); pid != pids_.rend(); ++pid)
        ::kill(*pid, SIGKILL);
    for (pid_t pid : pids_)
        while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
        }
    pids_.clear();
}

std::optional<int> run_as_rank(int argc, char **argv)
{
    if (argc != 4 || std::string(argv[1]) != rank_mark)
        return std::nullopt;
    auto rank = static_cast<std::uint32_t>(std::atoi(argv[2]));
    channel mine(std::atoi(argv[3]));
    try {
        setting s;
        std::vector<task> tasks;
        std::vector<int> fds;
        message m = mine.receive(patience_ms);
        m.get(s.shape).get_all(s.root).get_all(s.group).get(s.blocks).get_all(tasks).get_all(fds);
        if (rank > 0)
            serve(s, rank, mine);
        std::vector<channel> peers;
        for (int fd : fds)
            peers.emplace_back(fd);
        lead(s, tasks, peers, mine);
    } catch (const std::exception &e) {
        if (rank == 0) {
            message m;
            m.put_all(std::string(e.what()));
            mine.send(m);
        } else {
            std::cerr << "rank " << rank << ": " << e.what() << "\n";
        }
        return 1;
    }
    return 0;
}

} // namespace engine
