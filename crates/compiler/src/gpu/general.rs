//! Operators that go to the general kernels: any sizes, any strides, any precision.

use graph::ir::Node;

use super::lowering::{Lowering, Refusal};

impl Lowering<'_> {
    /// Lowers `node` onto the general kernels.
    pub fn general(&mut self, node: &Node) -> Result<(), Refusal> {
        Err(format!("{} has no kernel yet", node.op.name()))
    }

    /// Gives the outputs of a refused node some place, so that what follows can be looked at too.
    pub fn stand_in(&mut self, node: &Node) {
        for id in node.outputs.iter().flatten() {
            if let (Ok(shape), Ok(element)) = (self.shape(*id), self.element(*id)) {
                let view = self.packed(&shape, element);
                self.define(*id, view);
            }
        }
    }
}
