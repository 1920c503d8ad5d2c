// Noise from a counter: the same for a (seed, position, token) whoever asks, in whatever order.
//
// The generator is splitmix64 (Steele, Lea, Flood 2014): output i of the stream that starts at s is
// mix(s + (i + 1) * golden). Every (seed, position) has a start of its own, two rounds of mix, and the token id counts
// within it. The Python runtime (dflash2/runtime/noise.py, stream 0) computes the same integers.

#pragma once

#include <cmath>
#include <cstdint>

class dflash2_noise {
public:
    // noise of the tokens that may stand at `position`
    dflash2_noise(uint32_t seed, int64_t position) {
        const uint64_t state = mix((uint64_t(seed) << 32) + golden);
        start = mix(state + (uint64_t(position) + 1) * golden);
    }

    // 64 random bits
    uint64_t bits(int32_t token) const {
        return mix(start + (uint64_t(token) + 1) * golden);
    }

    // a number in (0, 1): 52 bits and a half are exact in a double and never reach the ends
    static double uniform(uint64_t bits) {
        return (double(bits >> 12) + 0.5) * 0x1p-52;
    }

    // standard Gumbel noise; argmax of log p + gumbel is a draw from p
    static double gumbel(uint64_t bits) {
        return -std::log(-std::log(uniform(bits)));
    }

    // at most 1 - uniform(bits), by less than 2^-23
    static float rest(uint64_t bits) {
        return float(uint32_t(~bits >> 40)) * 0x1p-24f;
    }

private:
    static constexpr uint64_t golden = 0x9E3779B97F4A7C15;

    static uint64_t mix(uint64_t z) {
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return z ^ (z >> 31);
    }

    uint64_t start;
};
