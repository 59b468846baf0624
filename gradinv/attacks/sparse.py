"""The sparsest vectors of a column space, the search behind `unmix`.

A matrix D of r columns, each with many zeros, is hidden in Y = D T with an unknown T. Each column of D is Y q for a q
at which |Y q|_1 has a local minimum on the sphere. Three things make the search quick and complete: reweighted least
squares, which finds a minimum in a few eigenvectors; the null vector of the rows that a candidate drives to zero, which
makes it exact; and the constraint that what is known is left behind, which turns each later minimum into a new column.

Vectors with the same structure, such as those of two pictures of one class, tie in |.|_1. So the later rounds minimise
the sum of square roots, for which they do not.
"""

import torch
from torch import Tensor

STARTS = 64  # candidates of one round, at most
REWEIGHTINGS = 30  # of reweighted least squares
MARGIN = 1e-4  # at the last step; entries below count alike
SHARE = 0.1  # of the rows, or a few more than there are directions, make a candidate exact
DRAWS = 2048  # of one round of sampling


class Space:
    """The column space of a matrix (m, n), of which the search needs a basis and its rows at length one.

    exact: whether there is nothing beyond the rank but the rounding of double precision.
    basis (m, rank): orthonormal; rows: those of the basis that are not zero; noise: how large what lies beyond the
    rank is, or rounding, against the smallest singular value that counts; zero (rows,): an entry of rows @ q below it
    counts as zero.
    """

    def __init__(self, matrix: Tensor, most: int):
        wanted = min(most + 8, *matrix.shape)
        left, sizes = _largest(matrix.double(), wanted)
        first = float(sizes[0])
        rounding = first * (1e-11 if matrix.dtype == torch.float64 else 25 * torch.finfo(matrix.dtype).eps)
        beyond = float(sizes[most]) if wanted > most else 0.0
        self.exact = matrix.dtype == torch.float64 and beyond < rounding
        self.rank = int((sizes[:most] > max(rounding, 2 * beyond)).sum())
        self.basis = left[:, : self.rank]
        self.noise = max(1e-2 * rounding, beyond) / float(sizes[self.rank - 1]) if self.rank else float("inf")
        if not self.rank:
            self.rows, self.zero = self.basis[:0], self.basis.new_zeros(0)
            return
        m, n = matrix.shape
        entry = self.noise / (m**0.5 + n**0.5)  # the norm of an m x n matrix of noise is that many of its entries
        lengths = self.basis.norm(dim=1)
        live = lengths > max(1e-12, 20 * entry)  # the others are mostly noise
        self.rows = self.basis[live] / lengths[live, None]
        self.zero = (5 * entry / lengths[live]).clamp(min=1e-7)  # five deviations of the noise in that row

    def zeros(self, directions: Tensor) -> Tensor:
        """Which rows each of some directions (k, rank) drives to zero, (k, rows)."""
        return (directions @ self.rows.T).abs() < self.zero

    def enough(self) -> float:
        """Zeros that no direction has by chance: any has one fewer than the rank where it is made to."""
        return self.rank - 0.5 + 2 * float(self.zero.sum()) * self.rank**0.5


def _largest(matrix: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """The largest left singular vectors (m, wanted) and singular values, by subspace iteration (Halko et al. 2011)."""
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(matrix.shape[1], wanted, generator=generator, dtype=matrix.dtype).to(matrix.device)
    basis = torch.linalg.qr(matrix @ probe)[0]
    for _ in range(3):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis)[0])[0]
    left, sizes, _ = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ left, sizes


def new_directions(space: Space, known: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Directions (k, rank) outside what the known ones span: with many zeros that single each out, and without.

    The second ones span, a few together, what vectors with the very same zeros span.
    """
    outside = torch.linalg.qr(known.T, mode="complete")[0][:, len(known) :] if len(known) else None
    many = min(STARTS, 4 * (space.rank - len(known)) + 4)
    starts = space.rows[_draw(len(space.rows), (many,), generator, space.rows.device)]
    minima = _minima(space, starts, outside, power=0.5 if len(known) else 1.0)
    exact, shared = _exact(space, minima, generator)
    return _singled_out(space, exact), shared


def drawn_directions(space: Space, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The same by luck, as Dimitrov et al. 2024 (SPEAR) do: the null vectors of rank - 1 rows drawn at random.

    The rows must all be zeros of one direction, which takes about 2^rank draws.
    """
    everything = torch.eye(space.rank, dtype=space.rows.dtype, device=space.rows.device)
    return _singled_out(space, _within(space, everything, generator, DRAWS)), everything[:0]


def independent(space: Space, first: Tensor, directions: Tensor) -> Tensor:
    """The first directions, and of the others those with the most zeros that go on to a basis, taken greedily."""
    order = space.zeros(directions).sum(1).argsort(descending=True, stable=True)
    chosen = directions[:0]
    left = torch.eye(space.rank, dtype=directions.dtype, device=directions.device)  # what the chosen ones do not span
    new = max(1e-4, 20 * float(space.zero.median()))  # what is less is one of them again, but for noise
    for direction in torch.cat([first, directions[order]]):
        rest = left @ direction
        if rest.norm() > new:
            chosen = torch.cat([chosen, direction[None]])
            rest = rest / rest.norm()
            left = left - torch.outer(rest, rest)
    return chosen


def _minima(space: Space, directions: Tensor, outside: Tensor | None, power: float) -> Tensor:
    """Local minima of sum |rows q|^power with |q| = 1, or with the part of q in `outside` at length one."""
    rows, margin, lowest = space.rows, 0.1, max(MARGIN, float(space.zero.median()))
    for _ in range(REWEIGHTINGS):
        weights = (rows @ directions.T).abs().clamp(min=margin).pow(power - 2)
        squares = (rows.T[None] * weights.T[:, None]) @ rows
        if outside is None:
            directions = torch.linalg.eigh(squares)[1][:, :, 0]
        else:
            # the best q with a given part u there is squares^-1 outside u, which leaves an eigenvalue problem for u
            factor = torch.linalg.cholesky_ex(squares)[0]
            best = torch.cholesky_solve(outside.expand(len(squares), *outside.shape), factor)
            directions = (best @ torch.linalg.eigh(outside.T @ best)[1][:, :, -1:])[:, :, 0]
            directions = directions / directions.norm(dim=1, keepdim=True)
        margin = max(0.7 * margin, lowest)
    return directions


def _exact(space: Space, directions: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The null vectors of the rows that each direction makes smallest, and bases of null spaces of several dimensions.

    Nothing for a direction that has no such null vector.
    """
    few = min(max(space.rank + 2, int(SHARE * len(space.rows))), len(space.rows))
    for _ in range(2):
        values = (directions @ space.rows.T).abs() / space.zero
        nearest = values.topk(few, dim=1, largest=False).indices
        chosen = space.rows[nearest]
        sizes, vectors = torch.linalg.eigh(chosen.transpose(1, 2) @ chosen)
        directions = vectors[:, :, 0]
    null = (sizes < space.zero[nearest].square().sum(1, keepdim=True)).sum(1).tolist()
    found, shared = [directions[:0]], [directions[:0]]
    for many, basis in zip(null, vectors, strict=True):
        if many == 1:
            found.append(basis[:, :1].T)
        elif many > 1:  # the zeros that several directions share: they lie in this space together
            found.append(_within(space, basis[:, :many].T, generator, 256))
            shared.append(basis[:, :many].T)
    return torch.cat(found), torch.cat(shared)


def _within(space: Space, null: Tensor, generator: torch.Generator, draws: int) -> Tensor:
    """The sparsest directions of a small space (k, r), from null vectors of k - 1 of its rows drawn at random."""
    inside = space.rows @ null.T
    sizes = inside.norm(dim=1)
    live = sizes > 10 * space.zero
    inside, zero = inside[live] / sizes[live, None], 10 * space.zero[live] / sizes[live]
    if len(inside) <= len(null):
        return null[:0]
    drawn = inside[_draw(len(inside), (draws, len(null) - 1), generator, inside.device)]
    tried = torch.linalg.eigh(drawn.transpose(1, 2) @ drawn)[1][:, :, 0]
    zeros = (tried @ inside.T).abs() < zero
    many = zeros.sum(1)
    order = many.argsort(descending=True)
    order = order[many[order] > len(null) + 1]  # by construction each has one fewer than the dimensions
    different: dict[bytes, int] = {}
    for i, pattern in zip(order.tolist(), zeros[order].cpu().numpy(), strict=True):
        different.setdefault(pattern.tobytes(), i)
    return tried[list(different.values())[:STARTS]] @ null


def _singled_out(space: Space, directions: Tensor) -> Tensor:
    """Those with enough zeros, of which no other direction has all; each at the null vector of all its zeros."""
    found, enough = [directions[:0]], space.enough()
    for zeros in space.zeros(directions):
        if zeros.sum() < enough:
            continue
        sizes, vectors = torch.linalg.eigh(space.rows[zeros].T @ space.rows[zeros])
        if sizes[1] > max(1e-6, 10 * float(space.zero[zeros].square().sum())):  # else the null space is larger
            found.append(vectors[:, :1].T)
    return torch.cat(found)


def _draw(below: int, shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randint(below, shape, generator=generator).to(device)
