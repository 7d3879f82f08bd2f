"""Products on a mesh with an axis of 3, which eight devices cannot have."""

from praxis_lite.sharding.propagation import Axis
from tools.splits.products import product_programs
from tools.splits.workers import Worker

A, B, C = Axis('a', 2), Axis('b', 2), Axis('c', 3)
# Splits of x, w and y in y[b, c] = sum_v x[b, v] w[v, c].
CASES = [
  (((B,), (A,)), ((B,), (A,)), ((), (A,))),  # One operand has to move.
  (((), (A,)), ((A,), ()), ((A,), (C, B))),  # The result has to, by several axes.
  (((B,), (A,)), ((A,), ()), ((B,), ())),  # None has to.
]


def test_product_beside_an_axis_of_3():
  worker = Worker((2, 2, 3))
  number, program = next((i, p) for i, p in enumerate(product_programs()) if p.name.startswith('bv,vc->bc'))
  without, with_guards = (worker.run('products', number, CASES, guarded) for guarded in (False, True))
  worker.close()
  assert [found.outcome for found in without] == ['wrong', 'wrong', 'right'], program.name
  assert [found.outcome for found in with_guards] == ['right'] * 3, program.name
  assert [found.guarded for found in with_guards] == [True, True, False]


def test_products_of_matrices_in_two_dimensions():
  """In y[g, h, b] = sum_v x[g, h, b, v] w[g, h, v], one array is split further along g."""
  cases = [
    (((), (), (A,), (B,)), ((A,), (), (B,)), ((), (), (A,))),  # w is gathered.
    (((A,), (), (), (B, C)), ((A,), (), (B, C)), ((A, C), (), ())),  # Sums are split further.
    (((A,), (), (), (B,)), ((A,), (), (B,)), ((A,), (), (C,))),  # Along b, which w does not have.
  ]
  worker = Worker((2, 2, 3))
  number = next(i for i, program in enumerate(product_programs()) if program.name.startswith('ghbv,ghv->ghb g=5'))
  without, with_guards = (worker.run('products', number, cases, guarded) for guarded in (False, True))
  worker.close()
  assert [found.outcome for found in without] == ['wrong', 'wrong', 'right']
  assert [found.outcome for found in with_guards] == ['right'] * 3
  assert [found.guarded for found in with_guards] == [True, True, False]
