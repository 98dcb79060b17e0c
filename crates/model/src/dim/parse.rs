//! Parses the text form of dimensions.

use super::SymDim;

const MAX_DEPTH: usize = 64;

impl SymDim {
    /// The dimension `text` describes; the inverse of `Display`. `None` when it is not one.
    pub fn parse(text: &str) -> Option<SymDim> {
        if text == "?" {
            return Some(SymDim::Unknown);
        }
        let mut parser = Parser { rest: text, depth: 0 };
        let dim = parser.sum()?;
        parser.rest.is_empty().then_some(dim)
    }
}

/// Whether `c` may stand in a symbol.
pub(crate) fn is_symbol_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '.'
}

struct Parser<'a> {
    rest: &'a str,
    depth: usize,
}

impl Parser<'_> {
    fn eat(&mut self, token: char) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn sum(&mut self) -> Option<SymDim> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let negative = self.eat('-');
        let mut total = self.product()?;
        if negative {
            total = SymDim::Fixed(0).sub(&total);
        }
        loop {
            if self.eat('+') {
                total = total.add(&self.product()?);
            } else if self.eat('-') {
                total = total.sub(&self.product()?);
            } else {
                self.depth -= 1;
                return Some(total);
            }
        }
    }

    fn product(&mut self) -> Option<SymDim> {
        let mut total = self.factor()?;
        loop {
            if self.eat('*') {
                total = total.mul(&self.factor()?);
            } else if self.eat('/') {
                total = total.div(&self.factor()?);
            } else {
                return Some(total);
            }
        }
    }

    fn factor(&mut self) -> Option<SymDim> {
        if self.eat('(') {
            let inner = self.sum()?;
            return self.eat(')').then_some(inner);
        }
        let end = self.rest.find(|c| !is_symbol_char(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word {
            "" => None,
            "min" | "max" if self.eat('(') => {
                let first = self.sum()?;
                let second = if self.eat(',') { self.sum()? } else { return None };
                let chosen =
                    if word == "min" { first.lesser(&second) } else { first.greater(&second) };
                self.eat(')').then_some(chosen)
            }
            word if word.starts_with(|c: char| c.is_ascii_digit()) => {
                word.parse().ok().map(SymDim::Fixed)
            }
            word => Some(SymDim::symbol(word)),
        }
    }
}
