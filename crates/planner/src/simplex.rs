//! A small revised simplex for programs with few rows and many columns, as in column generation.
//!
//! Minimises `cost x` subject to `A x = rhs`, `x >= 0`, with `rhs >= 0`. The inverse of the basis
//! is kept dense, so a pivot costs rows squared. Right-hand sides are perturbed a little against
//! cycling; that leaves every dual solution feasible, which is all that lower bounds need.

/// Reduced costs above minus this are taken as optimal.
const OPTIMAL: f64 = 1e-9;
/// Smaller pivots are refused.
const PIVOT: f64 = 1e-9;
/// Cost of the artificial columns that stand in until real ones cover a row.
const BIG: f64 = 1e5;
/// Pivots between two inversions of the basis; more if there are more rows.
const REFACTOR: usize = 64;

pub(crate) struct Simplex {
    rows: usize,
    rhs: Vec<f64>,
    costs: Vec<f64>,
    /// Row and value of the entries of each column.
    entries: Vec<Vec<(usize, f64)>>,
    basis: Vec<usize>,
    inverse: Vec<f64>,
    values: Vec<f64>,
    duals: Vec<f64>,
}

impl Simplex {
    /// A program with these right-hand sides and no columns yet.
    pub(crate) fn new(rhs: &[f64]) -> Simplex {
        let rows = rhs.len();
        let noise = |row: usize| 1e-7 * (1.0 + (row as f64 * 0.618_034).fract());
        let rhs: Vec<f64> = rhs.iter().enumerate().map(|(row, value)| value + noise(row)).collect();
        let mut simplex = Simplex {
            rows,
            values: rhs.clone(),
            rhs,
            costs: Vec::new(),
            entries: Vec::new(),
            basis: (0..rows).collect(),
            inverse: vec![0.0; rows * rows],
            duals: vec![0.0; rows],
        };
        for row in 0..rows {
            simplex.add_sparse(BIG, vec![(row, 1.0)]);
            simplex.inverse[row * rows + row] = 1.0;
        }
        simplex
    }

    /// Adds a column and returns its index.
    pub(crate) fn add(&mut self, cost: f64, entries: Vec<f64>) -> usize {
        debug_assert_eq!(entries.len(), self.rows);
        let sparse = entries.into_iter().enumerate().filter(|(_, value)| *value != 0.0);
        self.add_sparse(cost, sparse.collect())
    }

    /// Like [`Simplex::add`], with the rows and values of the entries that are not zero.
    pub(crate) fn add_sparse(&mut self, cost: f64, entries: Vec<(usize, f64)>) -> usize {
        self.costs.push(cost);
        self.entries.push(entries);
        self.costs.len() - 1
    }

    /// Optimises over the present columns with at most `pivots_max` pivots.
    pub(crate) fn solve(&mut self, pivots_max: usize) {
        for pivot in 0..pivots_max {
            if pivot % REFACTOR.max(self.rows) == REFACTOR.max(self.rows) - 1 {
                self.refactor();
            }
            self.price_rows();
            let Some(entering) = self.entering() else { return };
            let direction = self.direction(entering);
            let Some(leaving) = self.leaving(&direction) else { return };
            self.pivot(entering, leaving, &direction);
        }
        self.price_rows();
    }

    /// The dual value of each row.
    pub(crate) fn duals(&self) -> &[f64] {
        &self.duals
    }

    /// Cost of the present solution.
    pub(crate) fn objective(&self) -> f64 {
        self.basis.iter().zip(&self.values).map(|(&column, value)| self.costs[column] * value).sum()
    }

    /// The columns in use with their values.
    pub(crate) fn solution(&self) -> impl Iterator<Item = (usize, f64)> + '_ {
        self.basis.iter().copied().zip(self.values.iter().copied())
    }

    fn price_rows(&mut self) {
        let rows = self.rows;
        self.duals.iter_mut().for_each(|dual| *dual = 0.0);
        for (at, &column) in self.basis.iter().enumerate() {
            let cost = self.costs[column];
            if cost != 0.0 {
                let row = &self.inverse[at * rows..(at + 1) * rows];
                self.duals.iter_mut().zip(row).for_each(|(dual, value)| *dual += cost * value);
            }
        }
    }

    fn entering(&self) -> Option<usize> {
        let mut best = (-OPTIMAL, None);
        for (column, entries) in self.entries.iter().enumerate() {
            let worth: f64 = entries.iter().map(|(row, a)| a * self.duals[*row]).sum();
            let reduced = self.costs[column] - worth;
            if reduced < best.0 {
                best = (reduced, Some(column));
            }
        }
        best.1
    }

    fn direction(&self, column: usize) -> Vec<f64> {
        let entries = &self.entries[column];
        let row = |at: usize| &self.inverse[at * self.rows..(at + 1) * self.rows];
        (0..self.rows)
            .map(|at| entries.iter().map(|(entry, value)| row(at)[*entry] * value).sum())
            .collect()
    }

    fn leaving(&self, direction: &[f64]) -> Option<usize> {
        let mut best: Option<(f64, usize)> = None;
        for (at, &step) in direction.iter().enumerate() {
            if step > PIVOT {
                let ratio = self.values[at].max(0.0) / step;
                if best.is_none_or(|(least, _)| ratio < least) {
                    best = Some((ratio, at));
                }
            }
        }
        best.map(|(_, at)| at)
    }

    fn pivot(&mut self, entering: usize, leaving: usize, direction: &[f64]) {
        let rows = self.rows;
        let step = self.values[leaving].max(0.0) / direction[leaving];
        let scale = 1.0 / direction[leaving];
        let pivot_row: Vec<f64> = self.inverse[leaving * rows..(leaving + 1) * rows]
            .iter()
            .map(|value| value * scale)
            .collect();
        for (at, &slope) in direction.iter().enumerate() {
            if at == leaving || slope == 0.0 {
                continue;
            }
            self.values[at] -= slope * step;
            let row = &mut self.inverse[at * rows..(at + 1) * rows];
            row.iter_mut().zip(&pivot_row).for_each(|(value, pivot)| *value -= slope * pivot);
        }
        self.inverse[leaving * rows..(leaving + 1) * rows].copy_from_slice(&pivot_row);
        self.values[leaving] = step;
        self.basis[leaving] = entering;
    }

    /// Recomputes the inverse of the basis by Gauss-Jordan elimination with row pivoting.
    fn refactor(&mut self) {
        let rows = self.rows;
        let mut work = vec![0.0; rows * rows];
        for (at, &column) in self.basis.iter().enumerate() {
            self.entries[column].iter().for_each(|(row, value)| work[row * rows + at] = *value);
        }
        let mut inverse = vec![0.0; rows * rows];
        (0..rows).for_each(|row| inverse[row * rows + row] = 1.0);
        for column in 0..rows {
            let size = |row: usize| work[row * rows + column].abs();
            let Some(best) = (column..rows).max_by(|&a, &b| size(a).total_cmp(&size(b))) else {
                return;
            };
            if work[best * rows + column].abs() < 1e-12 {
                return;
            }
            for at in 0..rows {
                work.swap(column * rows + at, best * rows + at);
                inverse.swap(column * rows + at, best * rows + at);
            }
            let scale = 1.0 / work[column * rows + column];
            for at in 0..rows {
                work[column * rows + at] *= scale;
                inverse[column * rows + at] *= scale;
            }
            for row in 0..rows {
                let factor = work[row * rows + column];
                if row != column && factor != 0.0 {
                    for at in 0..rows {
                        work[row * rows + at] -= factor * work[column * rows + at];
                        inverse[row * rows + at] -= factor * inverse[column * rows + at];
                    }
                }
            }
        }
        self.inverse = inverse;
        for at in 0..rows {
            let row = &self.inverse[at * rows..(at + 1) * rows];
            self.values[at] = row.iter().zip(&self.rhs).map(|(value, rhs)| value * rhs).sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cutting_stock_relaxation_is_solved() {
        // Widths 3, 5, 7 from rolls of 16; equal primal and dual values prove the optimum.
        let mut simplex = Simplex::new(&[25.0, 20.0, 18.0]);
        let mut patterns = Vec::new();
        for a in 0..=5u32 {
            for b in 0..=3 {
                for c in 0..=2 {
                    if 3 * a + 5 * b + 7 * c <= 16 && a + b + c > 0 {
                        let pattern = vec![f64::from(a), f64::from(b), f64::from(c)];
                        simplex.add(1.0, pattern.clone());
                        patterns.push(pattern);
                    }
                }
            }
        }
        for row in 0..3 {
            let mut surplus = vec![0.0; 3];
            surplus[row] = -1.0;
            simplex.add(0.0, surplus);
        }
        simplex.solve(1000);
        let worth: f64 = simplex.duals().iter().zip([25.0, 20.0, 18.0]).map(|(d, b)| d * b).sum();
        assert!((simplex.objective() - worth).abs() < 1e-4);
        for pattern in patterns {
            let worth: f64 = pattern.iter().zip(simplex.duals()).map(|(a, dual)| a * dual).sum();
            assert!(worth <= 1.0 + 1e-9, "{pattern:?}: {worth}");
        }
    }
}
