"""Where each Triton kernel of `perilune.ops` lies in `far.everything_again`: what its program numbers, tables and
tensors are moved on by, past 2^31 elements in every tensor that grows with tokens, chunks, slots, pages or rows.

Widths are those of test_far.py: two heads, 16 or 32 numbers wide. Legend: T tokens, X chunks, N sequences, S slots.
"""

from __future__ import annotations

from typing import Any

from far import Far

T = 1 << 26  # tokens; times 32 numbers and more
X = 1 << 26  # chunks
N = 1 << 25  # sequences
S = 1 << 24  # slots, and pages of 16
TILES = 1 << 23  # tiles of the segmented scan


def norm(a: dict[str, Any]) -> Far:
    D, rows = a["D"], T // a["R"] * a["R"]
    names = ("x_MD", "added_MD", "gate_MD", "sum_MD", "y_MD", "d_y_MD", "d_sum_MD", "d_x_MD", "d_gate_MD")
    at = dict.fromkeys(names, rows * D) | {"r_M": rows, "d_w_PD": rows // a["R"] * D}
    return Far((rows // a["R"], 0, 0), at, {"M": rows})


def glu_forward(a: dict[str, Any]) -> Far:
    at = {"gate_RF": T * a["gate_stride"], "up_RF": T * a["up_stride"], "out_RF": T * a["F"]}
    return Far((T, 0, 0), at)


def glu_backward(a: dict[str, Any]) -> Far:
    at = {"d_RF": T * a["d_stride"], "gate_RF": T * a["gate_stride"], "up_RF": T * a["up_stride"]}
    return Far((T, 0, 0), at | {"both_R2F": 2 * T * a["F"]})


def few(a: dict[str, Any]) -> Far:
    """Rows of the weights."""
    F, rows = a["F"], T
    y = [(t * F, F, t * (F + rows) + rows) for t in range(a["T"])]
    at = {"w": rows * a.get("w_stride", 0), "y": y}
    at |= {"gate": rows * a.get("gate_stride", 0), "up": rows * a.get("up_stride", 0)}
    return Far((rows // a["BF"], 0, 0), at, {"F": rows})


def conv(a: dict[str, Any]) -> Far:
    tokens, C, span = a["T"], a["C"], a["S"]
    at = {
        "u_TC": T * a["stride"],
        "d_y_TC": T * a.get("d_stride", 0),
        **dict.fromkeys(("y_TC", "d_u_TC"), T * C),
        "d_w_P4C": T // span * 4 * C,
        **dict.fromkeys(("window_N3C", "d_after_N3C"), N * 3 * C),
        "ids_T": T,
        "bounds_2T": [(0, tokens, T), (tokens, tokens, 2 * T + tokens)],
    }
    return Far((T // span, 0, 0), at, {"T": T, "ids_T": N, "bounds_2T": T})


def conv_window(a: dict[str, Any]) -> Far:
    at = {"u_TC": T * a["stride"], "d_y_TC": T * a.get("d_stride", 0), "cu_N": N}
    windows = ("window_N3C", "after_N3C", "d_after_N3C", "d_window_N3C")
    return Far((N, 0, 0), at | dict.fromkeys(windows, N * 3 * a["C"]), {"cu_N": T})


def mixture(a: dict[str, Any]) -> Far:
    wide = ("sources", "y_TD", "d_y_TD", "d_later", "d_sources", "d_w_PD", "d_out_w_PD")
    at = dict.fromkeys(wide, T * a["D"]) | dict.fromkeys(("s_TN", "r_TN"), T * a["N"]) | {"r_out_T": T}
    return Far((T, 0, 0), at, {"T": T} if "T" in a else {})


def completed(a: dict[str, Any]) -> Far:
    tokens, D, mixers = a["T"], a["D"], a["h_MTD"].shape[0]
    places = [(m * tokens, tokens, T + m * (T + tokens)) for m in range(mixers)]
    h = [(first * D, count * D, where * D) for first, count, where in places]
    return Far((T, 0, 0), {"sources": T * D, "h_MTD": h, "lse_MT": places}, {"T": T})


def merge_norm(a: dict[str, Any]) -> Far:
    return Far((T, 0, 0), dict.fromkeys(("h_TD", "live_TD", "x_TD"), T * a["D"]) | {"lse_T": T})


def chunk(a: dict[str, Any]) -> Far:
    """KDA's kernels of one chunk and head; tokens lie at the moved table's places."""
    H, K, V = a["H"], a["K"], a.get("V", a["K"])
    parts = K // a["B"] if "radial" in a else 1
    of_chunks = {
        **dict.fromkeys(("w_out", "q_out", "k_out", "q_start", "k_start", "k_stop"), 64 * K),
        **dict.fromkeys(("A_out", "P_out", "A", "P", "M", "dP"), 64 * 64),
        **dict.fromkeys(("decay_out", "decay", "last", "d_bias"), K),
        **dict.fromkeys(("norm_out", "norms"), 128),
        **dict.fromkeys(("kept_S", "kept_dS"), K * V),
        **dict.fromkeys(("kept_U", "kept_dU"), 64 * V),
        "diagonal": 64,
        "d_A": parts,
        "radial": parts * 128,
    }
    at = {name: X * H * width for name, width in of_chunks.items()} | {"table": 3 * X}
    strides = {"q": "sq_t", "k": "sk_t", "g": "sg_t", "d_o": "so_t", "beta": "sb_t"}
    at |= {name: T * a[stride] for name, stride in strides.items() if stride in a}
    at |= dict.fromkeys(("dq_out", "dk_out", "dg_out", "dq", "dk"), T * H * K)
    at |= {"dv_out": T * H * V, "d_beta": T * H}
    programs = a["K"] // a["B"] if "dq_out" in a else 1
    return Far((X * H * programs, 0, 0), at, {"table": T})


def scan(a: dict[str, Any]) -> Far:
    """KDA's walks over a sequence's chunks, forward and back."""
    H, K, V = a["H"], a["K"], a["V"]
    wide, square, state = X * H * 64 * K, X * H * 64 * 64, H * K * V
    at = {
        **dict.fromkeys(("w", "q", "k"), wide),
        **dict.fromkeys(("A", "P"), square),
        **dict.fromkeys(("kept_S", "kept_dS"), X * state),
        **dict.fromkeys(("kept_U", "kept_dU"), X * H * 64 * V),
        **dict.fromkeys(("initial", "final", "d_final", "d_initial"), N * state),
        **dict.fromkeys(("states", "d_states"), S * state),
        **dict.fromkeys(("first_chunk", "cu", "shift"), N),
        "decay": X * H * K,
        "slots": X,
        "o": T * H * V,
        "v": T * a.get("sv_t", 0),
        "d_o": T * a.get("so_t", 0),
    }
    return Far((N * H * V // a["BV"], 0, 0), at, {"first_chunk": X, "cu": T}, {"slots": S})


def fold_tiles(a: dict[str, Any]) -> Far:
    H, K, V = a["H"], a["K"], a["V"]
    at = dict.fromkeys(("B", "entry", "after"), TILES * H * K * V) | {"M": TILES * H * K * K}
    at |= {"initial": N * H * K * V, "first_tile": N}
    return Far((N * H * V // a["BV"], 0, 0), at, {"first_tile": TILES})


def decode(a: dict[str, Any]) -> Far:
    heads, K, V, tokens = a["heads"], a["K"], a["V"], a.get("tokens", 1)
    state, channels = heads * K * V, heads * (2 * K + V)
    at = {f"{name}": N * tokens * a[stride] for name, stride in _DECODE.items() if stride in a}
    at |= {
        **dict.fromkeys(("slots_N", "counts_N", "matrices_N", "lengths_N", "target_N", "accepted_N"), N),
        "matrix_SHKV": 2 * S * state if "matrices_N" in a else S * state,
        "window_S3C": S * 3 * channels,
        "o_THV": N * tokens * heads * V,
        "scratch": N * tokens * heads * 8 * max(K, V),
        **dict.fromkeys(("k_SHRK", "g_SHRK"), S * heads * 71 * K),
        "u_SHRV": S * heads * 71 * V,
    }
    return Far((0, N, 0), at, real={"slots_N": S, "matrices_N": 2 * S, "target_N": 2 * S})


_DECODE = {
    "q_THK": "q_stride",
    "k_THK": "k_stride",
    "v_THV": "v_stride",
    "g_raw_THK": "g_stride",
    "beta_logit_TH": "beta_stride",
    "out_gate_THV": "gate_stride",
}


def by_head(x: Any, rows: int) -> list[tuple[int, int, int]]:
    """[H, T] with T + rows tokens a head."""
    heads, tokens = x.shape
    return [(h * tokens, tokens, h * (tokens + rows) + rows) for h in range(heads)]


def attention(a: dict[str, Any]) -> Far:
    """Varlen attention. Columns of the tables that are rows of q or k move on, by T each."""
    heads, V, width = a["heads"], a["V"], a["A"] + a["B"]
    at = {name: T * a[name].strides[0] for name in a if name.endswith("_desc")}
    at |= {name: by_head(a[name], T) for name in ("lse_HT", "delta_HT") if name in a}
    at |= {"o_THV": T * heads * V, "d_v_SHV": T * heads * V}
    at |= dict.fromkeys(("d_q_THQ", "d_k_SHQ"), T * heads * width)
    table = [T, 0, 0, T, 0] if "d_k_SHQ" in a else [T, T, T, 0, 0]
    return Far((0, 0, 0), at, {"tokens": T, "table_X5": table})


def delta(a: dict[str, Any]) -> Far:
    heads, rows = a["heads"], T // a["M"] * a["M"]
    at = {"o_THV": rows * heads * a["V"], "d_o_THV": rows * a["d_o_stride"], "delta_HT": by_head(a["delta_HT"], rows)}
    return Far((rows // a["M"], 0, 0), at, {"tokens": rows})


def paged(a: dict[str, Any]) -> Far:
    count = a["drafts"] * a["heads"] if "drafts" in a else a["count"]
    width, splits = a["A"] + a.get("B", 0), a["splits"]
    at = {
        "q_THL": N * count * width,
        "o_THC": N * count * a["A"],
        "lse_TH": N * count,
        "part_NXR": N * splits * count * a["A"],
        "part_lse_NXR": N * splits * count,
        "lengths_N": N,
        "table_NM": N * a.get("table_width", 0),
    }
    if "drafts" not in a:
        return Far((0, N, 0), at)
    at |= {name: S * a["S"] * a[name].strides[0] for name in ("rows1_desc", "rows2_desc")}
    return Far((0, 0, N), at, real={"table_NM": S})


def append(a: dict[str, Any]) -> Far:
    at = {"pages_PSL": 16 * S * a["L"], "rows_TL": T * a["row_stride"], "slots_T": T}
    return Far((T, 0, 0), at, real={"slots_T": 16 * S})


def route(a: dict[str, Any]) -> Far:
    wide, chosen = ("logits", "scores", "d_scores", "d_logits"), ("ids", "weights", "d_weights")
    at = dict.fromkeys(wide, T * a["E"]) | dict.fromkeys(chosen, T * a["J"]) | {"threshold": T}
    return Far((T, 0, 0), at)


def rows(a: dict[str, Any]) -> Far:
    """From tokens to expert rows and back: rows move on by twice the tokens."""
    L, J = a["L"], a["J"]
    at = dict.fromkeys(("x", "y", "d_y"), T * L) | dict.fromkeys(("rows", "d_rows"), 2 * T * L)
    at |= dict.fromkeys(("row_of_choice", "weights", "d_weights"), T * J)
    return Far((T, 0, 0), at, {"row_of_choice": 2 * T})


def sort(a: dict[str, Any]) -> Far:
    """Blocks of choices, experts side by side: 512 of them make the counts far."""
    blocks = 1 << 22
    choices = blocks * a["B"]
    at = {"ids": choices, "counts": blocks * a["E"], "starts": blocks * a["E"]}
    return Far((blocks, 0, 0), at, {"R": choices}, stored={"order": choices}, skip=("offs",))


def expert_glu(a: dict[str, Any]) -> Far:
    F = a["F"]
    at = dict.fromkeys(("h", "d_h"), 2 * T * F) | dict.fromkeys(("u", "a"), T * F) | dict.fromkeys(("w", "d_w"), T)
    return Far((T, 0, 0), at, {"offs": T, "R": T})


def tail(a: dict[str, Any]) -> Far:
    return Far((0, 0, 0), {"x": T * a["L"]}, {"offs": T, "R": T})


PLACES = {
    "norm.triton_kernels.rms_kernel": norm,
    "norm.triton_kernels.rms_backward_kernel": norm,
    "activation_triton._forward_kernel": glu_forward,
    "activation_triton._backward_kernel": glu_backward,
    "few_triton.few_kernel": few,
    "few_triton.glu_few_kernel": few,
    "conv.triton_kernels.conv_kernel": conv,
    "conv.triton_kernels.conv_backward_kernel": conv,
    "conv.triton_kernels.window_after_kernel": conv_window,
    "conv.triton_kernels.window_gradient_kernel": conv_window,
    "attnres.triton_kernels.mix_kernel": mixture,
    "attnres.triton_kernels.mix_backward_kernel": mixture,
    "attnres.triton_inference._completed_kernel": completed,
    "attnres.triton_inference._merge_kernel": merge_norm,
    "kda.triton_prepare.prepare_kernel": chunk,
    "kda.triton_scan.scan_kernel": scan,
    "kda.triton_fold.fold_kernel": fold_tiles,
    "kda.triton_backward_scan.reverse_scan_kernel": scan,
    "kda.triton_gradients.state_gradient_kernel": chunk,
    "kda.triton_gradients.key_gradient_kernel": chunk,
    "kda.triton_gradients.norm_gradient_kernel": chunk,
    "kda.decode_triton_kernels.step_kernel": decode,
    "kda.decode_triton_kernels.tail_kernel": decode,
    "kda.decode_triton_fold.fold_kernel": decode,
    "kda.decode_triton_fold.shift_kernel": decode,
    "mla.triton_forward.forward_kernel": attention,
    "mla.triton_backward.delta_kernel": delta,
    "mla.triton_backward.keys_kernel": attention,
    "mla.triton_backward.queries_kernel": attention,
    "mla.triton_paged.split_kernel": paged,
    "mla.triton_paged.merge_kernel": paged,
    "mla.triton_paged.append_kernel": append,
    "moe.triton_route.route_kernel": route,
    "moe.triton_route.route_backward_kernel": route,
    "moe.triton_rows.count_kernel": sort,
    "moe.triton_rows.place_kernel": sort,
    "moe.triton_rows.dispatch_kernel": rows,
    "moe.triton_rows.combine_kernel": rows,
    "moe.triton_rows.combine_backward_kernel": rows,
    "moe.triton_glu.glu_kernel": expert_glu,
    "moe.triton_glu.glu_backward_kernel": expert_glu,
    "moe.triton_glu.zero_tail_kernel": tail,
}
# Kernels that do not grow past 2^31 elements, or are tried in another way, and why.
NEAR = {
    "attnres.triton_kernels.weight_gradient_kernel": "one row a program of the backward pass",
    "moe.triton_rows.start_kernel": "walks over all blocks from the first one on",
    "moe.triton_rows.sort_kernel": "at most 1024 choices",
    "moe.triton_rows.invert_kernel": "one number a row, and rows are int32",
    "moe.triton_few.arrange_kernel": "at most 2048 choices",
    "moe.triton_product.product_kernel": "test_products_of_far_rows_and_experts",
    "moe.triton_product.glu_product_kernel": "test_products_of_far_rows_and_experts",
    "moe.triton_product.weight_gradient_kernel": "test_products_of_far_rows_and_experts",
    "moe.triton_packed.packed_product_kernel": "rows as in product_kernel, one expert more",
    "moe.triton_packed.packed_glu_product_kernel": "rows as in glu_product_kernel, one expert more",
}
__all__ = ["NEAR", "PLACES"]
