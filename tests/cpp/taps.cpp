// Prints the architectures that a patched library adds to the tappable ones, then those whose last output is tapped.
#include "dflash2-taps.h"

#include <cstdio>

int main() {
    printf("%s\n%s\n", dflash2_tapped_architectures(false), dflash2_tapped_architectures(true));
    return 0;
}
