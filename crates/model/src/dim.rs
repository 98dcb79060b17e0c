//! Symbolic dimensions: integer polynomials over named sizes, in one canonical form.
//!
//! Dimensions that are always equal are usually equal values, so passes compare them with
//! [`SymDim::is_same`]. The same type describes the elements of small integer tensors, because
//! shape arithmetic computes dimensions from them; those may be negative.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::plan::Dim;

mod parse;

/// Larger expressions become [`SymDim::Unknown`]: hostile models must not make them grow.
const MAX_TERMS: usize = 12;
const MAX_FACTORS: usize = 8;
const MAX_WEIGHT: usize = 48;

/// A size that is a number, an expression of symbols, or not known before the value is computed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SymDim {
    /// A number.
    Fixed(i64),
    /// An expression with at least one symbol.
    Expr(Arc<Polynomial>),
    /// Any size.
    Unknown,
}

/// A sum of products of symbols, never just a number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Polynomial(Vec<(Vec<Atom>, i64)>);

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Atom {
    Symbol(Arc<str>),
    Call(Function, [SymDim; 2]),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Function {
    Div,
    Min,
    Max,
}

type Terms = BTreeMap<Vec<Atom>, i64>;

impl SymDim {
    /// The size called `name`.
    pub fn symbol(name: &str) -> SymDim {
        SymDim::Expr(Arc::new(Polynomial(vec![(vec![Atom::Symbol(name.into())], 1)])))
    }

    /// The number, when it is one.
    pub fn fixed(&self) -> Option<i64> {
        match self {
            SymDim::Fixed(value) => Some(*value),
            _ => None,
        }
    }

    /// The number as a size, when it is one.
    pub fn size(&self) -> Option<usize> {
        self.fixed().and_then(|value| usize::try_from(value).ok())
    }

    /// Whether both are known and always equal.
    pub fn is_same(&self, other: &SymDim) -> bool {
        *self != SymDim::Unknown && self == other
    }

    /// Whether this is the number `value`.
    pub fn is(&self, value: i64) -> bool {
        self.fixed() == Some(value)
    }

    /// Whether this cannot be negative, given that no symbol is.
    pub fn is_non_negative(&self) -> bool {
        match self {
            SymDim::Fixed(value) => *value >= 0,
            SymDim::Expr(poly) => poly
                .0
                .iter()
                .all(|(atoms, factor)| *factor >= 0 && atoms.iter().all(Atom::is_non_negative)),
            SymDim::Unknown => false,
        }
    }

    /// The sum.
    pub fn add(&self, other: &SymDim) -> SymDim {
        self.combine(other, i64::checked_add, |a, b| merge(a, b, 1))
    }

    /// The difference.
    pub fn sub(&self, other: &SymDim) -> SymDim {
        self.combine(other, i64::checked_sub, |a, b| merge(a, b, -1))
    }

    /// The product.
    pub fn mul(&self, other: &SymDim) -> SymDim {
        if self.is(0) || other.is(0) {
            return SymDim::Fixed(0);
        }
        self.combine(other, i64::checked_mul, multiply)
    }

    /// The quotient, rounded towards zero.
    pub fn div(&self, other: &SymDim) -> SymDim {
        if other.is(1) {
            return self.clone();
        }
        if let (Some(a), Some(b)) = (self.fixed(), other.fixed()) {
            return a.checked_div(b).map_or(SymDim::Unknown, SymDim::Fixed);
        }
        if other.is(0) || *self == SymDim::Unknown || *other == SymDim::Unknown {
            return SymDim::Unknown;
        }
        if let Some(terms) = divide_exactly(&self.terms(), &other.terms()) {
            return from_terms(Some(terms));
        }
        match self.quotient_by_number() {
            // Truncating twice is truncating once by the product.
            Some((dividend, inner)) if inner > 0 && other.fixed().is_some_and(|n| n > 0) => {
                dividend.div(&SymDim::Fixed(inner).mul(other))
            }
            _ => call(Function::Div, self, other),
        }
    }

    /// Dividend and divisor when this is just a quotient by a number.
    fn quotient_by_number(&self) -> Option<(&SymDim, i64)> {
        let SymDim::Expr(poly) = self else { return None };
        let [(atoms, 1)] = poly.0.as_slice() else { return None };
        match atoms.as_slice() {
            [Atom::Call(Function::Div, [dividend, SymDim::Fixed(divisor)])] => {
                Some((dividend, *divisor))
            }
            _ => None,
        }
    }

    /// Whether the text needs no brackets inside a product.
    fn is_simple(&self) -> bool {
        match self {
            SymDim::Fixed(value) => *value >= 0,
            SymDim::Unknown => true,
            SymDim::Expr(poly) => poly.symbol().is_some(),
        }
    }

    /// The quotient, rounded up.
    pub fn div_ceil(&self, other: &SymDim) -> SymDim {
        self.add(&other.sub(&SymDim::Fixed(1))).div(other)
    }

    /// The remainder with the sign of the dividend.
    pub fn rem(&self, other: &SymDim) -> SymDim {
        self.sub(&self.div(other).mul(other))
    }

    /// The smaller.
    pub fn lesser(&self, other: &SymDim) -> SymDim {
        self.choose(Function::Min, other)
    }

    /// The larger.
    pub fn greater(&self, other: &SymDim) -> SymDim {
        self.choose(Function::Max, other)
    }

    fn choose(&self, function: Function, other: &SymDim) -> SymDim {
        let difference = self.sub(other);
        let first_is_larger = match &difference {
            SymDim::Unknown => return SymDim::Unknown,
            known if known.is_non_negative() => true,
            known if SymDim::Fixed(0).sub(known).is_non_negative() => false,
            _ if self <= other => return call(function, self, other),
            _ => return call(function, other, self),
        };
        let first = first_is_larger == (function == Function::Max);
        if first { self.clone() } else { other.clone() }
    }

    /// Whether this is `min(n, other)` for a number `n` above 1. If the two broadcast they are
    /// equal, since a size above `n` would not be valid.
    pub fn is_capped(&self, other: &SymDim) -> bool {
        let SymDim::Expr(poly) = self else { return false };
        let [(atoms, 1)] = poly.0.as_slice() else { return false };
        match atoms.as_slice() {
            [Atom::Call(Function::Min, [a, b])] => {
                let cap = |cap: &SymDim, dim: &SymDim| {
                    cap.fixed().is_some_and(|n| n > 1) && dim.is_same(other)
                };
                cap(a, b) || cap(b, a)
            }
            _ => false,
        }
    }

    /// The value with symbols bound by `lookup`; symbols without a binding stay.
    pub fn substitute(&self, lookup: &dyn Fn(&str) -> Option<i64>) -> SymDim {
        let SymDim::Expr(poly) = self else { return self.clone() };
        let mut sum = SymDim::Fixed(0);
        for (atoms, factor) in &poly.0 {
            let product = atoms.iter().fold(SymDim::Fixed(*factor), |product, atom| {
                product.mul(&match atom {
                    Atom::Symbol(name) => {
                        lookup(name).map_or_else(|| SymDim::symbol(name), SymDim::Fixed)
                    }
                    Atom::Call(function, [a, b]) => {
                        function.apply(&a.substitute(lookup), &b.substitute(lookup))
                    }
                })
            });
            sum = sum.add(&product);
        }
        sum
    }

    /// The symbols that occur, each once.
    pub fn symbols(&self) -> Vec<String> {
        let mut found = Vec::new();
        self.collect_symbols(&mut found);
        found.sort();
        found.dedup();
        found
    }

    fn collect_symbols(&self, found: &mut Vec<String>) {
        let SymDim::Expr(poly) = self else { return };
        for atom in poly.0.iter().flat_map(|(atoms, _)| atoms) {
            match atom {
                Atom::Symbol(name) => found.push(name.to_string()),
                Atom::Call(_, arguments) => {
                    arguments.iter().for_each(|argument| argument.collect_symbols(found));
                }
            }
        }
    }

    fn combine(
        &self,
        other: &SymDim,
        numbers: fn(i64, i64) -> Option<i64>,
        terms: fn(Terms, Terms) -> Option<Terms>,
    ) -> SymDim {
        match (self, other) {
            (SymDim::Unknown, _) | (_, SymDim::Unknown) => SymDim::Unknown,
            (SymDim::Fixed(a), SymDim::Fixed(b)) => {
                numbers(*a, *b).map_or(SymDim::Unknown, SymDim::Fixed)
            }
            _ => from_terms(terms(self.terms(), other.terms())),
        }
    }

    fn terms(&self) -> Terms {
        match self {
            SymDim::Fixed(0) | SymDim::Unknown => Terms::new(),
            SymDim::Fixed(value) => Terms::from([(vec![], *value)]),
            SymDim::Expr(poly) => poly.0.iter().cloned().collect(),
        }
    }

    fn weight(&self) -> usize {
        match self {
            SymDim::Expr(poly) => {
                poly.0.iter().flat_map(|(atoms, _)| atoms).map(Atom::weight).sum::<usize>() + 1
            }
            _ => 1,
        }
    }
}

impl Polynomial {
    /// The symbol's name, if the expression is just one symbol.
    fn symbol(&self) -> Option<&str> {
        match self.0.as_slice() {
            [(atoms, 1)] => match atoms.as_slice() {
                [Atom::Symbol(name)] => Some(name),
                _ => None,
            },
            _ => None,
        }
    }

    /// Whether the symbol called `name` occurs in the expression.
    pub fn has_symbol(&self, name: &str) -> bool {
        self.0.iter().flat_map(|(atoms, _)| atoms).any(|atom| atom.has_symbol(name))
    }
}

impl Atom {
    fn has_symbol(&self, name: &str) -> bool {
        match self {
            Atom::Symbol(symbol) => &**symbol == name,
            Atom::Call(_, arguments) => arguments.iter().any(|argument| match argument {
                SymDim::Expr(poly) => poly.has_symbol(name),
                SymDim::Fixed(_) | SymDim::Unknown => false,
            }),
        }
    }

    fn is_non_negative(&self) -> bool {
        match self {
            Atom::Symbol(_) => true,
            Atom::Call(Function::Max, [a, b]) => a.is_non_negative() || b.is_non_negative(),
            Atom::Call(_, [a, b]) => a.is_non_negative() && b.is_non_negative(),
        }
    }

    fn weight(&self) -> usize {
        match self {
            Atom::Symbol(_) => 1,
            Atom::Call(_, [a, b]) => 1 + a.weight() + b.weight(),
        }
    }
}

impl Function {
    fn apply(self, a: &SymDim, b: &SymDim) -> SymDim {
        match self {
            Function::Div => a.div(b),
            Function::Min => a.lesser(b),
            Function::Max => a.greater(b),
        }
    }
}

fn call(function: Function, a: &SymDim, b: &SymDim) -> SymDim {
    if a.weight() + b.weight() > MAX_WEIGHT {
        return SymDim::Unknown;
    }
    let atom = Atom::Call(function, [a.clone(), b.clone()]);
    SymDim::Expr(Arc::new(Polynomial(vec![(vec![atom], 1)])))
}

fn merge(mut a: Terms, b: Terms, sign: i64) -> Option<Terms> {
    for (atoms, factor) in b {
        let slot = a.entry(atoms).or_insert(0);
        *slot = slot.checked_add(factor.checked_mul(sign)?)?;
    }
    Some(a)
}

fn multiply(a: Terms, b: Terms) -> Option<Terms> {
    let mut product = Terms::new();
    for (left, x) in &a {
        for (right, y) in &b {
            let mut atoms = [left.as_slice(), right.as_slice()].concat();
            atoms.sort();
            let slot = product.entry(atoms).or_insert(0);
            *slot = slot.checked_add(x.checked_mul(*y)?)?;
        }
    }
    Some(product)
}

/// `a / b` when `b` is one term that divides every term of `a`, or `a` is a multiple of `b`.
fn divide_exactly(a: &Terms, b: &Terms) -> Option<Terms> {
    if let (1, Some((divisor, factor))) = (b.len(), b.iter().next()) {
        return a
            .iter()
            .map(|(atoms, x)| {
                let mut rest = atoms.clone();
                for atom in divisor {
                    rest.remove(rest.iter().position(|other| other == atom)?);
                }
                (x.checked_rem(*factor)? == 0).then_some((rest, x.checked_div(*factor)?))
            })
            .collect();
    }
    let (first, x) = a.iter().next()?;
    let ratio = x.checked_div(*b.get(first)?)?;
    let multiple: Option<Terms> =
        b.iter().map(|(atoms, y)| Some((atoms.clone(), y.checked_mul(ratio)?))).collect();
    (multiple.as_ref() == Some(a)).then(|| Terms::from([(vec![], ratio)]))
}

fn from_terms(terms: Option<Terms>) -> SymDim {
    let Some(mut terms) = terms else { return SymDim::Unknown };
    terms.retain(|_, factor| *factor != 0);
    let weight: usize = terms.keys().flatten().map(Atom::weight).sum();
    if terms.len() > MAX_TERMS
        || weight > MAX_WEIGHT
        || terms.keys().any(|atoms| atoms.len() > MAX_FACTORS)
    {
        return SymDim::Unknown;
    }
    match (terms.len(), terms.first_key_value()) {
        (0, _) => SymDim::Fixed(0),
        (1, Some((atoms, factor))) if atoms.is_empty() => SymDim::Fixed(*factor),
        _ => SymDim::Expr(Arc::new(Polynomial(terms.into_iter().collect()))),
    }
}

impl From<usize> for SymDim {
    fn from(size: usize) -> SymDim {
        i64::try_from(size).map_or(SymDim::Unknown, SymDim::Fixed)
    }
}

impl From<&SymDim> for Dim {
    /// Exact, except that a negative number is not a size and becomes [`Dim::Unknown`].
    fn from(dim: &SymDim) -> Dim {
        match dim {
            SymDim::Fixed(value) => usize::try_from(*value).map_or(Dim::Unknown, Dim::Fixed),
            SymDim::Expr(poly) => match poly.symbol() {
                Some(name) => Dim::Symbol(name.to_string()),
                None => Dim::Expr(Arc::clone(poly)),
            },
            SymDim::Unknown => Dim::Unknown,
        }
    }
}

impl From<&Dim> for SymDim {
    fn from(dim: &Dim) -> SymDim {
        match dim {
            Dim::Fixed(size) => SymDim::from(*size),
            Dim::Symbol(name) => SymDim::symbol(name),
            Dim::Expr(poly) => SymDim::Expr(Arc::clone(poly)),
            Dim::Unknown => SymDim::Unknown,
        }
    }
}

impl fmt::Display for SymDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SymDim::Fixed(value) => write!(f, "{value}"),
            SymDim::Unknown => f.write_str("?"),
            SymDim::Expr(poly) => poly.fmt(f),
        }
    }
}

impl fmt::Display for Polynomial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Constants read better behind the symbols.
        let (numbers, products): (Vec<_>, Vec<_>) =
            self.0.iter().partition(|(atoms, _)| atoms.is_empty());
        for (index, (atoms, factor)) in products.into_iter().chain(numbers).enumerate() {
            write_term(f, index == 0, atoms, *factor)?;
        }
        Ok(())
    }
}

fn write_term(f: &mut fmt::Formatter<'_>, first: bool, atoms: &[Atom], factor: i64) -> fmt::Result {
    match (factor < 0, first) {
        (true, _) => f.write_str("-")?,
        (false, true) => {}
        (false, false) => f.write_str("+")?,
    }
    let magnitude = factor.unsigned_abs();
    if atoms.is_empty() {
        return write!(f, "{magnitude}");
    }
    if magnitude != 1 {
        write!(f, "{magnitude}*")?;
    }
    for (index, atom) in atoms.iter().enumerate() {
        if index > 0 {
            f.write_str("*")?;
        }
        match atom {
            Atom::Symbol(name) => f.write_str(name)?,
            Atom::Call(Function::Div, [a, b]) => {
                f.write_str("(")?;
                write_operand(f, a)?;
                f.write_str("/")?;
                write_operand(f, b)?;
                f.write_str(")")?;
            }
            Atom::Call(Function::Min, [a, b]) => write!(f, "min({a},{b})")?,
            Atom::Call(Function::Max, [a, b]) => write!(f, "max({a},{b})")?,
        }
    }
    Ok(())
}

fn write_operand(f: &mut fmt::Formatter<'_>, dim: &SymDim) -> fmt::Result {
    if dim.is_simple() { write!(f, "{dim}") } else { write!(f, "({dim})") }
}

/// A shape as text, such as `[batch,3,224,224]`.
pub fn shape_text(shape: Option<&[SymDim]>) -> String {
    match shape {
        None => "[...]".to_string(),
        Some(dims) => {
            let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
            format!("[{}]", dims.join(","))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixed(value: i64) -> SymDim {
        SymDim::Fixed(value)
    }

    #[test]
    fn equal_expressions_are_equal_values() {
        let (a, b) = (SymDim::symbol("a"), SymDim::symbol("b"));
        let left = a.add(&b).mul(&fixed(2));
        let right = b.mul(&fixed(2)).add(&a).add(&a);
        assert!(left.is_same(&right));
        assert!(left.sub(&right).is(0));
        assert!(a.mul(&b).mul(&fixed(768)).div(&b.mul(&fixed(64))).is_same(&a.mul(&fixed(12))));
        assert!(!SymDim::Unknown.is_same(&SymDim::Unknown));
    }

    #[test]
    fn min_and_max_simplify_when_provable() {
        let a = SymDim::symbol("a");
        assert_eq!(a.greater(&fixed(0)), a);
        assert_eq!(a.lesser(&fixed(512)).to_string(), "min(512,a)");
        assert_eq!(a.add(&fixed(1)).greater(&a), a.add(&fixed(1)));
    }

    #[test]
    fn substitution_evaluates() {
        let h = SymDim::symbol("h");
        let out = h.sub(&fixed(1)).div(&fixed(2)).add(&fixed(1));
        assert_eq!(out.to_string(), "((h-1)/2)+1");
        assert_eq!(out.substitute(&|_| Some(224)), fixed(112));
        let twice = h.div(&fixed(2)).div(&fixed(3));
        assert_eq!(twice, h.div(&fixed(6)));
        assert_eq!(out.substitute(&|_| None), out);
        assert_eq!(out.symbols(), vec!["h".to_string()]);
    }

    #[test]
    fn text_parses_back() {
        let (h, w) = (SymDim::symbol("h"), SymDim::symbol("w"));
        let samples = [
            h.sub(&fixed(1)).div(&fixed(2)).add(&fixed(1)),
            h.mul(&w).mul(&fixed(-3)).add(&w.lesser(&fixed(7))),
            h.greater(&w.sub(&fixed(4))),
            fixed(-5),
        ];
        for sample in samples {
            assert_eq!(SymDim::parse(&sample.to_string()), Some(sample));
        }
        assert_eq!(SymDim::parse("h+"), None);
        assert_eq!(SymDim::parse(&"(".repeat(10_000)), None);
    }

    #[test]
    fn plan_dimensions_convert_back() {
        let (n, t) = (SymDim::symbol("n"), SymDim::symbol("t"));
        let samples = [n.clone(), fixed(3), n.mul(&t).add(&fixed(1)), SymDim::Unknown];
        for sample in samples {
            let dim = Dim::from(&sample);
            assert_eq!(SymDim::from(&dim), sample);
            assert_eq!(dim.to_string(), sample.to_string());
        }
        assert_eq!(Dim::from(&n), Dim::Symbol("n".to_string()));
        assert_eq!(Dim::from(&fixed(-1)), Dim::Unknown);
    }

    #[test]
    fn expressions_name_their_symbols() {
        let dim = Dim::from(&SymDim::symbol("n").add(&fixed(3)).div(&fixed(2)));
        let Dim::Expr(poly) = &dim else { panic!("{dim} is not an expression") };
        assert!(poly.has_symbol("n") && !poly.has_symbol("m"));
    }

    #[test]
    fn growth_is_bounded() {
        let mut dim = SymDim::symbol("a");
        for index in 0..100 {
            dim = dim.mul(&SymDim::symbol(&format!("s{index}")).add(&fixed(1)));
        }
        assert_eq!(dim, SymDim::Unknown);
        assert_eq!(fixed(i64::MAX).add(&fixed(1)), SymDim::Unknown);
        assert_eq!(fixed(i64::MIN).div(&fixed(-1)), SymDim::Unknown);
    }
}
