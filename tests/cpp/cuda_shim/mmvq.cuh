#pragma once

#include "common.cuh"

#define MMVQ_MAX_BATCH_SIZE 8
