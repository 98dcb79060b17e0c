//! Generates the C++ text of a chain.

use std::fmt::Write as _;

use model::op::{Activation, Binary, Compare, Unary, Variadic};

use super::super::loop_nest::{computed, computed_name, include};
use super::super::view::Element;
use super::{Access, Expr, Operand};

/// Properties of a chain's loops that are compile-time constants.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub rank: usize,
    pub count: usize,
}

/// A value of the generated function: a C++ expression without side effects, and its type.
type Value = (String, Element);

/// The function of a chain, as `Function` of `kernels/chain.cuh`.
pub(super) fn source(
    expr: &Expr,
    operands: &[Operand],
    axes: &[usize],
    output: Element,
    shape: Shape,
) -> Result<String, String> {
    let mut writer = Writer { operands, axes, lines: String::new(), named: 0 };
    let result = writer.value(expr)?;
    let (result, _) = writer.cast(result, computed(output))?;
    let elements: Vec<Element> =
        operands.iter().map(|operand| operand.element).chain([output]).collect();
    let mut text = include("chain.cuh", &elements);
    let (inputs, Shape { rank, count }) = (operands.len(), shape);
    let stored = output.cuda_name();
    let _ = write!(
        text,
        "namespace tiles {{\nstruct Function {{\n    \
         static constexpr int kInputs = {inputs}, kRank = {rank}, kCount = {count};\n    \
         template <class YieldPoint>\n    \
         static __device__ __forceinline__ bool apply(\
         const ChainPlace<kInputs, kRank, kCount>& place, const YieldPoint& yield_point)\n    {{\n"
    );
    for (i, operand) in operands.iter().enumerate() {
        let (kind, element) = (computed_name(operand.element), operand.element.cuda_name());
        let access = match operand.access {
            Access::Row => "kRow",
            Access::Point => "kOne",
            Access::Apart => "kApart",
            Access::Position => "kPlace",
        };
        let _ = writeln!(text, "        {kind} x{i}[kCount];");
        let _ = writeln!(text, "        place.load<{element}, {access}>({i}, x{i});");
    }
    let _ = write!(
        text,
        "        Pack<{stored}, kCount> y;\n#pragma unroll\n        \
         for (int i = 0; i < kCount; ++i) {{\n{}            \
         y.v[i] = Stored<{stored}>::of({result});\n        }}\n        \
         if (yield_point.is_preempted()) return false;\n        \
         place.store(y);\n        return true;\n    }}\n}};\n}} // namespace tiles\n",
        writer.lines
    );
    Ok(text)
}

struct Writer<'a> {
    operands: &'a [Operand],
    axes: &'a [usize],
    lines: String,
    named: usize,
}

impl Writer<'_> {
    /// Assigns the value of `text` to a variable.
    fn name(&mut self, text: &str, element: Element) -> Value {
        let name = format!("t{}", self.named);
        self.named += 1;
        let _ =
            writeln!(self.lines, "            const {} {name} = {text};", computed_name(element));
        (name, element)
    }

    fn value(&mut self, expr: &Expr) -> Result<Value, String> {
        match expr {
            Expr::Input(index) => self.input(*index),
            Expr::Coordinate(axis) => {
                let place = self.axes.iter().position(|known| known == axis);
                let inputs = self.operands.len() - self.axes.len();
                place.map_or(Err(format!("the index of dimension {axis} is not available")), |at| {
                    self.operand(inputs + at)
                })
            }
            Expr::Float(value) => Ok((float(*value), Element::F32)),
            Expr::Double(value) => Ok((double(*value), Element::F64)),
            Expr::Integer(element, value) => integer(*element, *value),
            Expr::Unary(unary, x) => {
                let x = self.value(x)?;
                self.unary(*unary, &x)
            }
            Expr::Binary(binary, a, b) => {
                let (a, b) = (self.value(a)?, self.value(b)?);
                self.binary(*binary, &a, &b)
            }
            Expr::Compare(compare, a, b) => {
                let (a, b) = (self.value(a)?, self.value(b)?);
                self.compare(*compare, &a, &b)
            }
            Expr::Variadic(variadic, all) => self.variadic(*variadic, all),
            Expr::Where(condition, a, b) => {
                let (condition, a, b) = (self.value(condition)?, self.value(a)?, self.value(b)?);
                expect(&condition, &[Element::Bool], "a condition")?;
                let element = same(&a, &b)?;
                Ok(self.name(&format!("{} ? {} : {}", condition.0, a.0, b.0), element))
            }
            Expr::Clip(x, low, high) => self.clip(x, low.as_deref(), high.as_deref()),
            Expr::PRelu(x, slope) => {
                let (x, slope) = (self.value(x)?, self.value(slope)?);
                let element = same(&x, &slope)?;
                let kind = computed_name(element);
                Ok(self.name(&format!("number::leaky_relu<{kind}>({}, {})", x.0, slope.0), element))
            }
            Expr::Cast(element, x) => {
                let x = self.value(x)?;
                self.cast(x, computed(*element))
            }
            Expr::Activation(activation, x) => {
                let x = self.value(x)?;
                self.activation(*activation, x)
            }
            Expr::ScaleShift(activation, x, scale, shift) => {
                let (x, scale, shift) = (self.value(x)?, self.value(scale)?, self.value(shift)?);
                same(&x, &scale)?;
                let element = same(&x, &shift)?;
                let scaled = self.name(&format!("{} * {} + {}", x.0, scale.0, shift.0), element);
                self.activation(*activation, scaled)
            }
        }
    }

    fn input(&mut self, index: usize) -> Result<Value, String> {
        let inputs = self.operands.len() - self.axes.len();
        if index >= inputs {
            return Err(format!("operand {index} of {inputs}"));
        }
        self.operand(index)
    }

    fn operand(&mut self, index: usize) -> Result<Value, String> {
        Ok((format!("x{index}[i]"), computed(self.operands[index].element)))
    }

    /// `x` converted to `to`, which is a computed type.
    fn cast(&mut self, x: Value, to: Element) -> Result<Value, String> {
        if x.1 == to {
            return Ok(x);
        }
        Ok(self.name(&format!("Convert<{}>::of({})", computed_name(to), x.0), to))
    }

    fn unary(&mut self, unary: Unary, x: &Value) -> Result<Value, String> {
        let (text, element) = (&x.0, x.1);
        let kind = computed_name(element);
        let is_integer = !element.is_float() && element != Element::Bool;
        match unary {
            Unary::Not => {
                expect(x, &[Element::Bool], "an operand of Not")?;
                return Ok(self.name(&format!("!{text}"), element));
            }
            Unary::BitNot if is_integer => {
                return Ok(self.name(&format!("({kind})~{text}"), element));
            }
            Unary::Abs if element != Element::Bool => {
                return Ok(self.name(&format!("number::abs({text})"), element));
            }
            Unary::Neg if element != Element::Bool => {
                return Ok(self.name(&format!("({kind})-{text}"), element));
            }
            Unary::Sign if element != Element::Bool => {
                return Ok(self.name(&format!("number::sign({text})"), element));
            }
            Unary::Relu if element != Element::Bool => {
                return Ok(self.name(&format!("number::relu({text})"), element));
            }
            _ if !element.is_float() => {
                return Err(format!("{unary:?} of {element:?} is not supported"));
            }
            Unary::IsNan => return Ok(self.name(&format!("{text} != {text}"), Element::Bool)),
            Unary::IsInf { positive, negative } => {
                let call = format!("number::is_infinite({text}, {positive}, {negative})");
                return Ok(self.name(&call, Element::Bool));
            }
            _ => {}
        }
        let call = float_function(unary, text, kind)?;
        Ok(self.name(&call, element))
    }

    fn binary(&mut self, binary: Binary, a: &Value, b: &Value) -> Result<Value, String> {
        if binary == Binary::Pow {
            return self.power(a, b);
        }
        let element = same(a, b)?;
        let (kind, is_float) = (computed_name(element), element.is_float());
        let is_integer = !is_float && element != Element::Bool;
        let infix = |sign: &str| format!("({kind})({} {sign} {})", a.0, b.0);
        let call = |function: &str| format!("number::{function}<{kind}>({}, {})", a.0, b.0);
        let plain = |function: &str| format!("number::{function}({}, {})", a.0, b.0);
        let text = match binary {
            Binary::And | Binary::Or | Binary::Xor if element != Element::Bool => {
                return Err(format!("{binary:?} of {element:?} is not supported"));
            }
            Binary::And => infix("&&"),
            Binary::Or => infix("||"),
            Binary::Xor => infix("!="),
            _ if element == Element::Bool => {
                return Err(format!("{binary:?} of Bool is not supported"));
            }
            Binary::Add => infix("+"),
            Binary::Sub => infix("-"),
            Binary::Mul => infix("*"),
            Binary::Div => plain("quotient"),
            Binary::Mod => call("modulo"),
            Binary::Fmod => plain("remainder"),
            _ if !is_integer => return Err(format!("{binary:?} of {element:?} is not supported")),
            Binary::BitAnd => infix("&"),
            Binary::BitOr => infix("|"),
            Binary::BitXor => infix("^"),
            Binary::ShiftLeft => call("shift_left"),
            Binary::ShiftRight => call("shift_right"),
            Binary::Pow => return self.power(a, b),
        };
        Ok(self.name(&text, element))
    }

    /// The exponent may have another type; the result has the base's.
    fn power(&mut self, base: &Value, exponent: &Value) -> Result<Value, String> {
        let element = base.1;
        if element == Element::Bool || exponent.1 == Element::Bool {
            return Err("power of Bool is not supported".to_string());
        }
        if element.is_float() {
            let exponent = self.cast(exponent.clone(), element)?;
            // Squares are the most frequent and need no logarithm.
            return Ok(match exponent.0.as_str() {
                "2.0f" => self.name(&format!("{0} * {0}", base.0), element),
                "0.5f" => self.name(&format!("number::sqrt({})", base.0), element),
                _ => self.name(&format!("number::power({}, {})", base.0, exponent.0), element),
            });
        }
        let kind = computed_name(element);
        if exponent.1.is_float() {
            let text = format!("({kind})::pow((double){}, (double){})", base.0, exponent.0);
            return Ok(self.name(&text, element));
        }
        let text = format!("number::integer_power<{kind}>({}, (long long){})", base.0, exponent.0);
        Ok(self.name(&text, element))
    }

    fn compare(&mut self, compare: Compare, a: &Value, b: &Value) -> Result<Value, String> {
        same(a, b)?;
        let sign = match compare {
            Compare::Equal => "==",
            Compare::Less => "<",
            Compare::LessOrEqual => "<=",
            Compare::Greater => ">",
            Compare::GreaterOrEqual => ">=",
        };
        Ok(self.name(&format!("{} {sign} {}", a.0, b.0), Element::Bool))
    }

    fn variadic(&mut self, variadic: Variadic, all: &[Expr]) -> Result<Value, String> {
        let (first, rest) =
            all.split_first().ok_or("an operator of any number of operands has none")?;
        let mut sum = self.value(first)?;
        if sum.1 == Element::Bool {
            return Err(format!("{variadic:?} of Bool is not supported"));
        }
        let kind = computed_name(sum.1);
        for expr in rest {
            let next = self.value(expr)?;
            same(&sum, &next)?;
            let text = match variadic {
                Variadic::Sum | Variadic::Mean => format!("({kind})({} + {})", sum.0, next.0),
                Variadic::Max => format!("number::larger<{kind}>({}, {})", sum.0, next.0),
                Variadic::Min => format!("number::smaller<{kind}>({}, {})", sum.0, next.0),
            };
            sum = self.name(&text, sum.1);
        }
        if variadic == Variadic::Mean && !rest.is_empty() {
            sum = self.name(&format!("({kind})({} / ({kind}){})", sum.0, all.len()), sum.1);
        }
        Ok(sum)
    }

    fn clip(&mut self, x: &Expr, low: Option<&Expr>, high: Option<&Expr>) -> Result<Value, String> {
        let mut x = self.value(x)?;
        for (bound, function) in [(low, "at_least"), (high, "at_most")] {
            if let Some(bound) = bound {
                let bound = self.value(bound)?;
                let element = same(&x, &bound)?;
                let kind = computed_name(element);
                x = self
                    .name(&format!("number::{function}<{kind}>({}, {})", x.0, bound.0), element);
            }
        }
        Ok(x)
    }

    fn activation(&mut self, activation: Activation, x: Value) -> Result<Value, String> {
        let unary = match activation {
            Activation::None => return Ok(x),
            Activation::Clip { low, high } => {
                expect(&x, &[Element::F32, Element::F64], "an operand of Clip")?;
                let kind = computed_name(x.1);
                let (low, high) = (float(low), float(high));
                let text = format!("number::between<{kind}>({}, {low}, {high})", x.0);
                return Ok(self.name(&text, x.1));
            }
            Activation::Relu => Unary::Relu,
            Activation::LeakyRelu { alpha } => Unary::LeakyRelu { alpha },
            Activation::Sigmoid => Unary::Sigmoid,
            Activation::Tanh => Unary::Tanh,
            Activation::Silu => Unary::Silu { alpha: 1.0 },
            Activation::Gelu { tanh } => Unary::Gelu { tanh },
            Activation::HardSwish => Unary::HardSwish,
            Activation::HardSigmoid { alpha, beta } => Unary::HardSigmoid { alpha, beta },
        };
        self.unary(unary, &x)
    }
}

/// A call of a function that exists for floating-point numbers only.
fn float_function(unary: Unary, x: &str, kind: &str) -> Result<String, String> {
    let plain = |name: &str| format!("number::{name}({x})");
    let with = |name: &str, parameters: &[f32]| {
        let list: Vec<String> = parameters.iter().map(|value| float(*value)).collect();
        format!("number::{name}<{kind}>({x}, {})", list.join(", "))
    };
    Ok(match unary {
        Unary::Acos => plain("acos"),
        Unary::Acosh => plain("acosh"),
        Unary::Asin => plain("asin"),
        Unary::Asinh => plain("asinh"),
        Unary::Atan => plain("atan"),
        Unary::Atanh => plain("atanh"),
        Unary::Ceil => plain("ceil"),
        Unary::Celu { alpha } => with("celu", &[alpha]),
        Unary::Cos => plain("cos"),
        Unary::Cosh => plain("cosh"),
        Unary::Elu { alpha } => with("elu", &[alpha]),
        Unary::Erf => plain("erf"),
        Unary::Exp => plain("exp"),
        Unary::Floor => plain("floor"),
        Unary::Gelu { tanh: false } => plain("gelu"),
        Unary::Gelu { tanh: true } => plain("gelu_tanh"),
        Unary::HardSigmoid { alpha, beta } => with("hard_sigmoid", &[alpha, beta]),
        Unary::HardSwish => plain("hard_swish"),
        Unary::LeakyRelu { alpha } => with("leaky_relu", &[alpha]),
        Unary::Log => plain("log"),
        Unary::Mish => plain("mish"),
        Unary::Reciprocal => format!("({kind})1 / {x}"),
        Unary::Round => plain("round"),
        Unary::Selu { alpha, gamma } => with("selu", &[alpha, gamma]),
        Unary::Shrink { bias, lambda } => with("shrink", &[bias, lambda]),
        Unary::Sigmoid => plain("sigmoid"),
        Unary::Silu { alpha } => with("silu", &[alpha]),
        Unary::Sin => plain("sin"),
        Unary::Sinh => plain("sinh"),
        Unary::Softplus => plain("softplus"),
        Unary::Softsign => plain("softsign"),
        Unary::Sqrt => plain("sqrt"),
        Unary::Tan => plain("tan"),
        Unary::Tanh => plain("tanh"),
        Unary::ThresholdedRelu { alpha } => with("thresholded_relu", &[alpha]),
        Unary::Abs | Unary::BitNot | Unary::IsInf { .. } | Unary::IsNan | Unary::Neg => {
            return Err(format!("{unary:?} of {kind}"));
        }
        Unary::Not | Unary::Relu | Unary::Sign => return Err(format!("{unary:?} of {kind}")),
    })
}

/// A constant, exact to the bit.
fn float(value: f32) -> String {
    match value {
        value if value.is_nan() => "__int_as_float(0x7fc00000)".to_string(),
        value if value.is_infinite() && value > 0.0 => "__int_as_float(0x7f800000)".to_string(),
        value if value.is_infinite() => "__int_as_float(0xff800000)".to_string(),
        value if value.is_sign_negative() => format!("({value:?}f)"),
        value => format!("{value:?}f"),
    }
}

fn double(value: f64) -> String {
    if value.is_finite() {
        return if value.is_sign_negative() {
            format!("({value:?})")
        } else {
            format!("{value:?}")
        };
    }
    format!("__longlong_as_double(0x{:x}ll)", value.to_bits())
}

fn integer(element: Element, value: i64) -> Result<Value, String> {
    if element.is_float() {
        return Err(format!("an integer constant of type {element:?}"));
    }
    // The lowest number has no literal of its own.
    let literal = if value == i64::MIN {
        "(-9223372036854775807ll - 1)".to_string()
    } else {
        format!("{value}ll")
    };
    Ok((format!("({})({literal})", computed_name(element)), element))
}

fn same(a: &Value, b: &Value) -> Result<Element, String> {
    if a.1 == b.1 { Ok(a.1) } else { Err(format!("operands of types {:?} and {:?}", a.1, b.1)) }
}

fn expect(value: &Value, elements: &[Element], what: &str) -> Result<(), String> {
    if elements.contains(&value.1) { Ok(()) } else { Err(format!("{what} is {:?}", value.1)) }
}
