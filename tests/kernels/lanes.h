// Runs the threads of a GPU block on the CPU: every lane is a coroutine, switched at barriers only.
// Between two barriers the lanes run in a random order, so that code that needs a missing barrier gives other results.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

// Shared (threadgroup) memory: static, gathered in one section so that every block finds it poisoned.
#define LANES_SHARED static __attribute__((section("lanes_shared")))
extern char __start_lanes_shared[] __attribute__((weak));
extern char __stop_lanes_shared[] __attribute__((weak));

class lanes {
public:
    enum state { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

    static constexpr int WARP = 32;

    // Runs `body` once per lane 0..n-1; `enter(lane)` is called whenever a lane gets the CPU.
    static void run_block(int n, const std::function<void()> & body, const std::function<void(int)> & enter) {
        lanes l(n, body, enter);
        if (__start_lanes_shared) {
            memset(__start_lanes_shared, 0xa5, __stop_lanes_shared - __start_lanes_shared);
        }
        current() = &l;
        while (l.step()) {
        }
        current() = nullptr;
    }

    static void block_barrier() { current()->wait(AT_BLOCK_BARRIER); }
    static void warp_barrier()  { current()->wait(AT_WARP_BARRIER); }

    // What lane `from` of the caller's warp passed to the same call.
    template <typename T>
    static T exchange(T value, int from) {
        lanes & l = *current();
        memcpy(l.slots[l.now], &value, sizeof(T));
        const int me = l.now;
        warp_barrier();
        T other;
        memcpy(&other, l.slots[me / WARP * WARP + from], sizeof(T));
        warp_barrier();
        return other;
    }

    static int lane() { return current()->now % WARP; }

private:
    static constexpr size_t STACK = 32 << 10;

    lanes(int n, const std::function<void()> & body, const std::function<void(int)> & enter)
            : n(n), body(body), enter(enter), states(n, READY), contexts(n), stacks(new char[n * STACK]), slots(new char[n][16]), order(n) {
        for (int i = 0; i < n; ++i) {
            getcontext(&contexts[i]);
            contexts[i].uc_stack.ss_sp   = stacks.get() + i * STACK;
            contexts[i].uc_stack.ss_size = STACK;
            contexts[i].uc_link          = &scheduler;
            makecontext(&contexts[i], start, 0);
            order[i] = i;
        }
    }

    static lanes *& current() {
        static lanes * l = nullptr;
        return l;
    }

    static void start() {
        lanes & l = *current();
        l.body();
        l.states[l.now] = DONE;
    }

    void wait(state s) {
        const int me = now;
        states[me] = s;
        swapcontext(&contexts[me], &scheduler);
    }

    // Lets every lane run to its next barrier, then opens the barriers that all lanes have reached.
    bool step() {
        static std::mt19937 random(7);
        std::shuffle(order.begin(), order.end(), random);
        for (int i : order) {
            if (states[i] == READY) {
                now = i;
                enter(i);
                swapcontext(&scheduler, &contexts[i]);
            }
        }
        bool opened = open(0, n, AT_BLOCK_BARRIER);
        for (int w = 0; w < n; w += WARP) {
            opened = open(w, std::min(n, w + WARP), AT_WARP_BARRIER) || opened;
        }
        bool all_done = true;
        for (state s : states) {
            all_done = all_done && s == DONE;
        }
        if (!all_done && !opened) {
            fprintf(stderr, "a barrier that not every lane reaches\n");
            abort();
        }
        return !all_done;
    }

    bool open(int begin, int end, state s) {
        for (int i = begin; i < end; ++i) {
            if (states[i] != s) {
                return false;
            }
        }
        for (int i = begin; i < end; ++i) {
            states[i] = READY;
        }
        return true;
    }

    int                          n;
    int                          now = 0;
    std::function<void()>        body;
    std::function<void(int)>     enter;
    std::vector<state>           states;
    std::vector<ucontext_t>      contexts;
    std::unique_ptr<char[]>      stacks;
    std::unique_ptr<char[][16]>  slots;
    std::vector<int>             order;
    ucontext_t                   scheduler;
};
