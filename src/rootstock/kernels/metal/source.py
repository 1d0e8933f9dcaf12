"""Source of the Metal kernels: bodies of functions, whose signatures `mx.fast.metal_kernel` writes.

MLX puts an input of fewer than eight numbers into the `constant` address space and names the compiled function by
that. Small inputs would therefore compile the kernel once more, and a pointer declared `device` would not take them.
Inputs that a pointer is taken of have at least eight numbers, always.

Numbers that change from step to step (lengths, splits, width of the tables) are data. Template arguments are only
numbers with few values in a model, because each combination is compiled.
"""

from __future__ import annotations

LANES = 32  # of a simdgroup
SIMDGROUPS = 8  # of a threadgroup; 256 threads fit, however many registers the compiler takes
TILE = 8  # numbers of a tile's record: see `launch.Launch`
ROW = 4  # numbers of a row's record

_CONSTANTS = f"""
    constexpr int LANES = {LANES}, SIMDGROUPS = {SIMDGROUPS}, TILE = {TILE}, ROW = {ROW};
    constexpr float NO_SCORE = -3e38f;  // below each score, and finite: nothing depends on how infinities are treated
"""

ATTEND_INPUTS = (
    *("query", "keys", "values", "key_scales", "value_scales"),
    *("table", "tiles", "rows", "sinks", "scale", "softcap"),
)
ATTEND_OUTPUTS = ("out",)
ATTEND = (
    _CONSTANTS
    + """
    constexpr int QN = (D + LANES - 1) / LANES;  // numbers of a key in each lane
    constexpr int VN = (V + LANES - 1) / LANES;
    constexpr int STEP = QN + VN <= 8 ? 4 : QN + VN <= 16 ? 2 : 1;  // positions whose loads are under way together

    const int lane = thread_index_in_simdgroup;
    const int simd = simdgroup_index_in_threadgroup;
    const int split = threadgroup_position_in_grid.z;
    const int splits = threadgroups_per_grid.z;
    const int pieces = threadgroups_per_grid.x / HEADS;  // threadgroups that share the query heads of a KV head
    const int head = threadgroup_position_in_grid.x / pieces;
    const int piece = threadgroup_position_in_grid.x % pieces;
    const device int* tile = tiles + TILE * threadgroup_position_in_grid.y;
    const device int* blocks = table + tile[0];
    const int begin = tile[3], end = tile[4], span = tile[5];
    const int from = begin + split * span;
    const int to = metal::min(end, from + span);
    if (split > 0 && from >= to)
        return;

    // A line is a query head of a row. `groups` simdgroups have lines of their own and read the same positions;
    // `parts` of them share the positions of the same lines.
    const int groups = tile[6];
    const int parts = SIMDGROUPS / groups;
    const int group = simd % groups, part = simd / groups;
    const int lines = tile[2] * G;
    const int most = (lines + pieces - 1) / pieces;
    const int count = metal::min(most, lines - piece * most);
    const int each = (count + groups - 1) / groups;
    const int line = piece * most + group * each;
    const int mine = metal::min(each, count - group * each);

    float q[L][QN], o[L][VN], top[L], sum[L];
    int seen_from[L], seen_to[L];
#pragma clang loop unroll(full)
    for (int l = 0; l < L; ++l) {
        top[l] = NO_SCORE;
        sum[l] = 0;
        seen_from[l] = seen_to[l] = 0;
        for (int j = 0; j < QN; ++j)
            q[l][j] = 0;
        for (int j = 0; j < VN; ++j)
            o[l][j] = 0;
        if (l < mine) {
            const int row = tile[1] + (line + l) / G;
            const int q_head = head * G + (line + l) % G;
            const size_t place = size_t(row) * (HEADS * G) + q_head;
            seen_from[l] = rows[ROW * row];
            seen_to[l] = rows[ROW * row + 1];
            for (int j = 0; j < QN; ++j)
                if (D % LANES == 0 || lane * QN + j < D)
                    q[l][j] = scale * static_cast<float>(query[place * D + lane * QN + j]);
            if (SINKS && split == 0 && part == 0) {
                top[l] = static_cast<float>(sinks[q_head]);
                sum[l] = 1;
            }
        }
    }

    for (int at = from + part; at < to && mine > 0; at += STEP * parts) {
        T k[STEP][QN], v[STEP][VN];
        float key_scale[STEP], value_scale[STEP];
#pragma clang loop unroll(full)
        for (int t = 0; t < STEP; ++t) {
            const int position = at + t * parts;
            if (position < to) {
                const size_t slot = size_t(blocks[position / BLOCK]) * BLOCK + position % BLOCK;
                const device T* key = keys + (slot * HEADS + head) * D + lane * QN;
                const device T* value = values + (slot * HEADS + head) * VALUE_ROW + lane * VN;
                if (QUANTIZED) {
                    key_scale[t] = key_scales[slot * HEADS + head];
                    value_scale[t] = value_scales[slot * HEADS + head];
                }
                for (int j = 0; j < QN; ++j)
                    if (D % LANES == 0 || lane * QN + j < D)
                        k[t][j] = key[j];
                    else
                        k[t][j] = static_cast<T>(0.0f);
                for (int j = 0; j < VN; ++j)
                    if (V % LANES == 0 || lane * VN + j < V)
                        v[t][j] = value[j];
                    else
                        v[t][j] = static_cast<T>(0.0f);
            }
        }
#pragma clang loop unroll(full)
        for (int t = 0; t < STEP; ++t) {
            const int position = at + t * parts;
            if (position < to) {
#pragma clang loop unroll(full)
                for (int l = 0; l < L; ++l) {
                    // The same for all lanes of a simdgroup, so simd_sum is reached by all of them or by none.
                    if (l < mine && (!SEVERAL || (position >= seen_from[l] && position < seen_to[l]))) {
                        float score = 0;
                        for (int j = 0; j < QN; ++j)
                            score += q[l][j] * static_cast<float>(k[t][j]);
                        score = simd_sum(score);
                        if (QUANTIZED)
                            score *= key_scale[t];
                        if (SOFTCAP)
                            score = softcap * metal::precise::tanh(score / softcap);
                        if (score > top[l]) {
                            const float fade = metal::fast::exp(top[l] - score);
                            top[l] = score;
                            sum[l] *= fade;
                            for (int j = 0; j < VN; ++j)
                                o[l][j] *= fade;
                        }
                        const float weight = metal::fast::exp(score - top[l]);
                        sum[l] += weight;
                        const float share = QUANTIZED ? weight * value_scale[t] : weight;
                        for (int j = 0; j < VN; ++j)
                            o[l][j] += share * static_cast<float>(v[t][j]);
                    }
                }
            }
        }
    }

    // The parts' results become one.
    threadgroup float tops[SIMDGROUPS * L];
    threadgroup float sums[SIMDGROUPS * L];
    threadgroup float sides[SIMDGROUPS * V];
    if (lane == 0) {
#pragma clang loop unroll(full)
        for (int l = 0; l < L; ++l) {
            tops[simd * L + l] = top[l];
            sums[simd * L + l] = sum[l];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
    for (int l = 0; l < L; ++l) {
        float highest = NO_SCORE;
        for (int p = 0; p < parts; ++p)
            highest = metal::max(highest, tops[(p * groups + group) * L + l]);
        float total = 0;
        for (int p = 0; p < parts; ++p) {
            const int other = (p * groups + group) * L + l;
            total += sums[other] * metal::fast::exp(tops[other] - highest);
        }
        const float fade = metal::fast::exp(top[l] - highest);
        for (int j = 0; j < VN; ++j)
            if (V % LANES == 0 || lane * VN + j < V)
                sides[simd * V + lane * VN + j] = o[l][j] * fade;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (l < mine) {
            const int row = tile[1] + (line + l) / G;
            const size_t place = size_t(row) * (HEADS * G) + head * G + (line + l) % G;
            for (int d = part * LANES + lane; d < V; d += parts * LANES) {
                float added = 0;
                for (int p = 0; p < parts; ++p)
                    added += sides[(p * groups + group) * V + d];
                if (SPLIT)
                    out[(place * splits + split) * (V + 2) + d] = static_cast<O>(added);
                else
                    out[place * V + d] = static_cast<O>(total > 0 ? added / total : 0.0f);
            }
            if (SPLIT && part == 0 && lane == 0) {
                out[(place * splits + split) * (V + 2) + V] = static_cast<O>(highest);
                out[(place * splits + split) * (V + 2) + V + 1] = static_cast<O>(total);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
"""
)

MERGE_INPUTS = ("partial", "rows")
MERGE_OUTPUTS = ("out",)
MERGE = (
    _CONSTANTS
    + """
    const int d = thread_position_in_grid.x;
    const int q_head = thread_position_in_grid.y;
    const int row = thread_position_in_grid.z;
    const int splits = partial_shape[2];
    const int used = rows[ROW * row + 2];  // the others were never written
    const size_t place = size_t(row) * HEADS + q_head;
    const device float* pieces = partial + place * splits * (V + 2);

    float highest = NO_SCORE;
    for (int s = 0; s < used; ++s)
        highest = metal::max(highest, pieces[s * (V + 2) + V]);
    float total = 0, added = 0;
    for (int s = 0; s < used; ++s) {
        const device float* piece = pieces + s * (V + 2);
        const float fade = metal::fast::exp(piece[V] - highest);
        total += fade * piece[V + 1];
        added += fade * piece[d];
    }
    out[place * V + d] = static_cast<O>(total > 0 ? added / total : 0.0f);
"""
)
