#!/bin/sh
# CMake's compiler launcher for `make sanitize`: sources with code of ours, or with calls to it, are checked for bad
# accesses and undefined behaviour, the other kernels of the CPU backend for the former; the rest is compiled as ever.
for source; do :; done # CMake gives it last
if grep -qs dflash2 "$source"; then
    set -- "$@" -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
elif [ "${source#*/ggml-cpu/}" != "$source" ]; then
    set -- "$@" -g1 -fno-omit-frame-pointer -fsanitize=address
fi
exec $(command -v ccache) "$@"
