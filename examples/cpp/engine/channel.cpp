#include "channel.hpp"

#include <cerrno>
#include <poll.h>
#include <sys/socket.h>
#include <system_error>
#include <unistd.h>

namespace engine {
namespace {

[[noreturn]] void fail(const char *what) { throw std::system_error(errno, std::generic_category(), what); }

void read_all(int fd, void *into, std::size_t n, int timeout_ms)
{
    for (std::size_t done = 0; done < n;) {
        pollfd p{fd, POLLIN, 0};
        int ready = poll(&p, 1, timeout_ms);
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready < 0)
            fail("poll");
        if (ready == 0)
            throw std::runtime_error("the other process does not answer");
        ssize_t got = read(fd, static_cast<char *>(into) + done, n - done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            throw std::runtime_error("the other process is gone");
        done += static_cast<std::size_t>(got);
    }
}

void write_all(int fd, const void *from, std::size_t n)
{
    for (std::size_t done = 0; done < n;) {
        ssize_t put = ::send(fd, static_cast<const char *>(from) + done, n - done, MSG_NOSIGNAL);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            fail("the other process is gone");
        done += static_cast<std::size_t>(put);
    }
}

} // namespace

channel::~channel()
{
    if (fd_ >= 0)
        close(fd_);
}

std::pair<channel, channel> channel::make()
{
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0)
        fail("socketpair");
    return {channel(fds[0]), channel(fds[1])};
}

void channel::send(const message &m) const
{
    auto n = static_cast<std::uint32_t>(m.data_.size());
    write_all(fd_, &n, sizeof n);
    write_all(fd_, m.data_.data(), n);
}

message channel::receive(int timeout_ms) const
{
    message m;
    std::uint32_t n = 0;
    read_all(fd_, &n, sizeof n, timeout_ms);
    m.data_.resize(n);
    read_all(fd_, m.data_.data(), n, timeout_ms);
    return m;
}

} // namespace engine
