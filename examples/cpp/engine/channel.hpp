// Messages between the engine's processes, over socket pairs.
#ifndef ENGINE_CHANNEL_HPP
#define ENGINE_CHANNEL_HPP

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

namespace engine {

// Plain values one after the other; both ends run the same program.
class message {
public:
    template <class T> message &put(const T &value)
    {
        static_assert(std::is_trivially_copyable_v<T>);
        auto *bytes = reinterpret_cast<const unsigned char *>(&value);
        data_.insert(data_.end(), bytes, bytes + sizeof value);
        return *this;
    }
    template <class List> message &put_all(const List &list)
    {
        put(static_cast<std::uint32_t>(list.size()));
        for (const auto &value : list)
            put(value);
        return *this;
    }
    template <class T> message &get(T &value)
    {
        static_assert(std::is_trivially_copyable_v<T>);
        if (data_.size() - at_ < sizeof value)
            throw std::runtime_error("a message ends too early");
        std::memcpy(&value, data_.data() + at_, sizeof value);
        at_ += sizeof value;
        return *this;
    }
    template <class List> message &get_all(List &list)
    {
        std::uint32_t n = 0;
        get(n);
        if (n > data_.size())
            throw std::runtime_error("a message ends too early");
        list.resize(n);
        for (auto &value : list)
            get(value);
        return *this;
    }

private:
    friend class channel;
    std::vector<unsigned char> data_;
    std::size_t at_ = 0;
};

// One end of a socket pair. Owns the descriptor.
class channel {
public:
    explicit channel(int fd) : fd_(fd) {}
    channel(channel &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    channel &operator=(channel &&other) noexcept
    {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~channel();

    // Two ends; neither is inherited by programs that are started.
    static std::pair<channel, channel> make();

    int fd() const { return fd_; }
    int release() { return std::exchange(fd_, -1); }
    void send(const message &m) const;
    // Waits up to timeout_ms. Throws when the other end is gone or silent.
    message receive(int timeout_ms) const;

private:
    int fd_;
};

} // namespace engine

#endif
