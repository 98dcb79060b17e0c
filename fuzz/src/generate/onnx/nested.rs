//! Nodes with graphs of their own, functions of the model, and tree ensembles.

use super::{BOOL, Builder, FLOAT, INT64, tensor_type, text};
use crate::mutate::{one_in, pick};
use crate::protobuf::{Field, put_varint};

/// Deepest nesting of bodies.
const DEPTH_MAX: usize = 2;

fn ints(name: &str, values: &[i64]) -> Field {
    let mut packed = Vec::new();
    values.iter().for_each(|value| put_varint(*value as u64, &mut packed));
    Field::Message(5, vec![text(1, name), Field::Bytes(8, packed), Field::Varint(20, 7)])
}

fn floats(name: &str, values: &[f32]) -> Field {
    let packed = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Field::Message(5, vec![text(1, name), Field::Bytes(7, packed), Field::Varint(20, 6)])
}

fn strings(name: &str, values: &[&str]) -> Field {
    let mut fields = vec![text(1, name)];
    fields.extend(values.iter().map(|value| text(9, value)));
    fields.push(Field::Varint(20, 8));
    Field::Message(5, fields)
}

fn integer(name: &str, value: u64) -> Field {
    Field::Message(5, vec![text(1, name), Field::Varint(3, value), Field::Varint(20, 2)])
}

fn word(name: &str, value: &str) -> Field {
    Field::Message(5, vec![text(1, name), text(4, value), Field::Varint(20, 3)])
}

fn graph(name: &str, fields: Vec<Field>) -> Field {
    Field::Message(5, vec![text(1, name), Field::Message(6, fields), Field::Varint(20, 5)])
}

impl Builder<'_> {
    /// A node that is more than an operator with operands; an operator where that is not possible.
    pub(super) fn special_node(&mut self) {
        match self.random.below(6) {
            0 if self.depth < DEPTH_MAX => self.branch(),
            1 if self.depth < DEPTH_MAX => self.rounds(),
            2 if self.depth < DEPTH_MAX => self.scan(),
            3 => self.trees(),
            4 | 5 if self.function.is_some() => self.call(),
            _ => self.operator_node(),
        }
    }

    /// Adds a node with `outputs` outputs.
    fn add(&mut self, mut fields: Vec<Field>, operator: &str, domain: &str, outputs: usize) {
        for _ in 0..outputs {
            let name = self.name();
            fields.push(text(2, &name));
            self.values.push(name);
        }
        fields.push(text(4, operator));
        if !domain.is_empty() {
            fields.push(text(7, domain));
        }
        self.nodes.push(Field::Message(1, fields));
    }

    fn same(&mut self, value: &str) -> String {
        self.add(vec![text(1, value)], "Identity", "", 1);
        self.values.last().cloned().unwrap_or_default()
    }

    /// A graph that reads `arguments` and what is around it. Its first output is the value of
    /// `first`, if there is one; `more` are its own.
    fn body(
        &mut self,
        arguments: &[(String, u64)],
        first: Option<&str>,
        more: usize,
    ) -> Vec<Field> {
        let nodes = std::mem::take(&mut self.nodes);
        let constants = std::mem::take(&mut self.constants);
        let outer = self.values.len();
        self.values.extend(arguments.iter().map(|(name, _)| name.clone()));
        let first = first.map(|value| self.same(value));
        self.depth += 1;
        for _ in 0..1 + self.random.below(2) {
            self.node();
        }
        self.depth -= 1;
        let own = self.values.split_off(outer);
        let mut fields = std::mem::replace(&mut self.nodes, nodes);
        fields.extend(std::mem::replace(&mut self.constants, constants));
        fields.push(text(2, "body"));
        for (name, element) in arguments {
            let kind = Field::Message(2, tensor_type(*element, &[]));
            fields.push(Field::Message(11, vec![text(1, name), kind]));
        }
        let mut outputs: Vec<String> = first.into_iter().collect();
        outputs.extend((0..more).map(|_| pick(self.random, &own).clone()));
        fields.extend(outputs.iter().map(|name| Field::Message(12, vec![text(1, name)])));
        fields
    }

    fn arguments(&mut self, elements: &[u64]) -> Vec<(String, u64)> {
        elements.iter().map(|element| (self.name(), *element)).collect()
    }

    fn branch(&mut self) {
        let condition = match one_in(self.random, 2) {
            true => self.operand('x'),
            false => self.operand('B'),
        };
        let outputs = 1 + self.random.below(2) as usize;
        let branches = ["then_branch", "else_branch"].map(|name| {
            let body = self.body(&[], None, outputs);
            graph(name, body)
        });
        let fields = [text(1, &condition)].into_iter().chain(branches).collect();
        self.add(fields, "If", "", outputs);
    }

    fn rounds(&mut self) {
        let (carried, collected) = (self.random.below(3) as usize, self.random.below(2) as usize);
        let rounds = self.random.below(4) as i64;
        let most = self.initializer(&[], INT64, rounds.to_le_bytes().to_vec());
        let goes_on = self.operand('B');
        let mut fields = vec![text(1, &most), text(1, &goes_on)];
        for _ in 0..carried {
            let state = self.operand('x');
            fields.push(text(1, &state));
        }
        let elements = [vec![INT64, BOOL], vec![FLOAT; carried]].concat();
        let arguments = self.arguments(&elements);
        let condition = arguments[1].0.clone();
        let body = self.body(&arguments, Some(&condition), carried + collected);
        fields.push(graph("body", body));
        self.add(fields, "Loop", "", (carried + collected).max(1));
    }

    fn scan(&mut self) {
        let (states, collected) =
            (self.random.below(2) as usize, 1 + self.random.below(2) as usize);
        let sequences = 1 + self.random.below(2) as usize;
        let mut fields = Vec::new();
        for _ in 0..states + sequences {
            let operand = self.operand('x');
            fields.push(text(1, &operand));
        }
        let arguments = self.arguments(&vec![FLOAT; states + sequences]);
        let body = self.body(&arguments, None, states + collected);
        fields.push(graph("body", body));
        fields.push(integer("num_scan_inputs", sequences as u64));
        for (name, count) in [
            ("scan_input_directions", sequences),
            ("scan_output_directions", collected),
            ("scan_input_axes", sequences),
            ("scan_output_axes", collected),
        ] {
            if one_in(self.random, 3) {
                let values: Vec<i64> = (0..count).map(|_| self.random.below(2) as i64).collect();
                fields.push(ints(name, &values));
            }
        }
        self.add(fields, "Scan", "", states + collected);
    }

    fn call(&mut self) {
        let inputs = self.function.unwrap_or(1);
        let mut fields = Vec::new();
        for _ in 0..inputs {
            let operand = self.operand('x');
            fields.push(text(1, &operand));
        }
        self.add(fields, "F", "local", 1);
    }

    /// A function of the model, which nodes may call from now on. Functions have no initializers:
    /// their constants are nodes.
    pub(super) fn define_function(&mut self) -> Field {
        let values = std::mem::take(&mut self.values);
        let nodes = std::mem::take(&mut self.nodes);
        let constants = std::mem::take(&mut self.constants);
        let inputs = 1 + self.random.below(2) as usize;
        let arguments: Vec<String> = (0..inputs).map(|_| self.name()).collect();
        self.values.extend(arguments.iter().cloned());
        for _ in 0..1 + self.random.below(2) {
            self.node();
        }
        let own = std::mem::replace(&mut self.values, values);
        let body = std::mem::replace(&mut self.nodes, nodes);
        let tensors = std::mem::replace(&mut self.constants, constants);
        let mut fields = vec![text(1, "F")];
        fields.extend(arguments.iter().map(|name| text(4, name)));
        fields.extend(own.last().map(|name| text(5, name)));
        for tensor in tensors {
            let Field::Message(_, tensor) = tensor else { continue };
            let name = tensor.iter().find_map(|field| match field {
                Field::Bytes(8, name) => Some(Field::Bytes(2, name.clone())),
                _ => None,
            });
            let value = vec![text(1, "value"), Field::Message(5, tensor), Field::Varint(20, 4)];
            let constant = [text(4, "Constant"), Field::Message(5, value)];
            fields.push(Field::Message(7, name.into_iter().chain(constant).collect()));
        }
        fields.extend(body.into_iter().map(|node| match node {
            Field::Message(_, node) => Field::Message(7, node),
            other => other,
        }));
        for (domain, version) in super::IMPORTS {
            fields.push(Field::Message(9, vec![text(1, domain), Field::Varint(2, *version)]));
        }
        fields.push(text(10, "local"));
        self.function = Some(inputs);
        Field::Message(25, fields)
    }

    /// Trees of one split each, with what belongs together in arrays of one length, mostly.
    fn trees(&mut self) {
        let is_classifier = one_in(self.random, 2);
        let trees = 1 + self.random.below(3) as i64;
        let each = |f: fn(i64, i64) -> i64| -> Vec<i64> {
            (0..trees).flat_map(|tree| (0..3).map(move |node| f(tree, node))).collect()
        };
        let split = *pick(
            self.random,
            &["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"],
        );
        let modes: Vec<&str> = (0..trees).flat_map(|_| [split, "LEAF", "LEAF"]).collect();
        let features: Vec<i64> = each(|_, _| 0).iter().map(|_| self.small_integer()).collect();
        let values: Vec<f32> = features.iter().map(|_| self.random.symmetric_f32()).collect();
        let mut fields = vec![
            ints("nodes_treeids", &each(|tree, _| tree)),
            ints("nodes_nodeids", &each(|_, node| node)),
            ints("nodes_featureids", &features),
            strings("nodes_modes", &modes),
            floats("nodes_values", &values),
            ints("nodes_truenodeids", &each(|_, node| i64::from(node == 0))),
            ints("nodes_falsenodeids", &each(|_, node| if node == 0 { 2 } else { 0 })),
        ];
        let leaf = |f: fn(i64, i64) -> i64| -> Vec<i64> {
            (0..trees).flat_map(|tree| (1..3).map(move |node| f(tree, node))).collect()
        };
        let weights: Vec<f32> =
            leaf(|_, _| 0).iter().map(|_| self.random.symmetric_f32()).collect();
        let prefix = if is_classifier { "class" } else { "target" };
        fields.push(ints(&format!("{prefix}_treeids"), &leaf(|tree, _| tree)));
        fields.push(ints(&format!("{prefix}_nodeids"), &leaf(|_, node| node)));
        fields.push(ints(&format!("{prefix}_ids"), &leaf(|_, node| node - 1)));
        fields.push(floats(&format!("{prefix}_weights"), &weights));
        let kind = *pick(self.random, &["NONE", "SOFTMAX", "LOGISTIC", "PROBIT", "SOFTMAX_ZERO"]);
        fields.push(word("post_transform", kind));
        match (is_classifier, one_in(self.random, 2)) {
            (true, true) => fields.push(ints("classlabels_int64s", &[3, 5])),
            (true, false) => fields.push(strings("classlabels_strings", &["a", "b"])),
            (false, _) => fields.push(integer("n_targets", 2)),
        }
        if one_in(self.random, 4) {
            // One that lacks something.
            let left_out = self.random.below(fields.len() as u64) as usize;
            fields.remove(left_out);
        }
        let operand = self.operand('x');
        fields.insert(0, text(1, &operand));
        let operator =
            if is_classifier { "TreeEnsembleClassifier" } else { "TreeEnsembleRegressor" };
        self.add(fields, operator, "ai.onnx.ml", if is_classifier { 2 } else { 1 });
    }
}
