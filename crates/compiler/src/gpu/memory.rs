//! Memory planning: buffers whose lifetimes overlap share no byte.

use super::lowering::{ALIGNMENT, Buffer, BufferLocation, PendingStep};

/// The first and the last step that uses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// First step.
    pub first: usize,
    /// The last step during which no other step may write its bytes.
    pub last: usize,
}

/// Offsets into the arena, by buffer, and the arena's size.
#[derive(Clone, Debug, Default)]
pub struct Arena {
    /// Byte offset of every buffer that is in the arena and used.
    pub offsets: Vec<Option<u64>>,
    /// Bytes.
    pub bytes: u64,
}

/// The lifetime of each buffer.
pub fn lifetimes(buffers: &[Buffer], steps: &[PendingStep]) -> Vec<Option<Lifetime>> {
    let mut lifetimes: Vec<Option<Lifetime>> = vec![None; buffers.len()];
    for (index, step) in steps.iter().enumerate() {
        for view in step.work.reads.iter().chain(&step.work.writes) {
            let life = &mut lifetimes[view.buffer.0 as usize];
            let first = life.map_or(index, |life| life.first);
            *life = Some(Lifetime { first, last: index });
        }
    }
    lifetimes
}

/// Places the largest buffers first, each at the lowest offset that is free for its whole lifetime.
pub fn plan(buffers: &[Buffer], steps: &[PendingStep]) -> Arena {
    let lifetimes = lifetimes(buffers, steps);
    let mut order: Vec<usize> = (0..buffers.len())
        .filter(|index| {
            buffers[*index].location == BufferLocation::Arena && lifetimes[*index].is_some()
        })
        .collect();
    order.sort_by_key(|index| (std::cmp::Reverse(buffers[*index].bytes), *index));
    let mut arena = Arena { offsets: vec![None; buffers.len()], bytes: 0 };
    let mut placed: Vec<(u64, u64, Lifetime)> = Vec::new();
    for index in order {
        let Some(life) = lifetimes[index] else { continue };
        let bytes = buffers[index].bytes as u64;
        let offset = lowest_gap(&placed, life, bytes);
        let at = placed.partition_point(|(start, ..)| *start < offset);
        placed.insert(at, (offset, bytes, life));
        arena.offsets[index] = Some(offset);
        arena.bytes = arena.bytes.max(offset + bytes);
    }
    arena.bytes = arena.bytes.next_multiple_of(ALIGNMENT as u64);
    arena
}

/// The lowest offset at which `bytes` are free during `life`. `placed` is sorted by offset.
fn lowest_gap(placed: &[(u64, u64, Lifetime)], life: Lifetime, bytes: u64) -> u64 {
    let mut offset = 0;
    for (start, size, other) in placed {
        if other.last < life.first || life.last < other.first {
            continue;
        }
        if offset + bytes <= *start {
            break;
        }
        offset = offset.max(start + size);
    }
    offset
}

/// Every pair of buffers that overlap in time and memory. Independent of how offsets were found.
pub fn collisions(buffers: &[Buffer], steps: &[PendingStep], arena: &Arena) -> Vec<(usize, usize)> {
    let lifetimes = lifetimes(buffers, steps);
    let mut found = Vec::new();
    for a in 0..buffers.len() {
        for b in a + 1..buffers.len() {
            let (Some(place_a), Some(place_b)) = (arena.offsets[a], arena.offsets[b]) else {
                continue;
            };
            let (Some(life_a), Some(life_b)) = (lifetimes[a], lifetimes[b]) else { continue };
            let together = life_a.first <= life_b.last && life_b.first <= life_a.last;
            let apart = place_a + buffers[a].bytes as u64 <= place_b
                || place_b + buffers[b].bytes as u64 <= place_a;
            if together && !apart {
                found.push((a, b));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::draft::StepDraft;
    use crate::gpu::view::{BufferId, Element, View};

    fn view(buffer: u32) -> View {
        let (shape, strides) = (vec![8], vec![1]);
        View {
            buffer: BufferId(buffer),
            offset: 0,
            shape,
            strides,
            element: Element::F16,
            slack: 0,
        }
    }

    fn step(reads: &[u32], writes: &[u32]) -> PendingStep {
        let views = |ids: &[u32]| ids.iter().map(|id| view(*id)).collect();
        let work = StepDraft {
            op: "Test",
            signature: String::new(),
            drafts: vec![],
            reads: views(reads),
            writes: views(writes),
            flops: 0,
            weight_bytes: 0,
            finish_tiles: None,
        };
        PendingStep { name: String::new(), work }
    }

    #[test]
    fn a_chain_needs_few_buffers_and_random_graphs_never_collide() {
        let sized = |bytes| Buffer { bytes, location: BufferLocation::Arena };
        let chain: Vec<PendingStep> = (0..9).map(|i| step(&[i], &[i + 1])).collect();
        let buffers: Vec<Buffer> = (0..10).map(|_| sized(1024)).collect();
        assert_eq!(plan(&buffers, &chain).bytes, 2 * 1024);
        let long: Vec<PendingStep> = (0..99).map(|i| step(&[i], &[i + 1])).collect();
        let buffers: Vec<Buffer> = (0..100).map(|_| sized(1024)).collect();
        assert_eq!(plan(&buffers, &long).bytes, 2 * 1024);
        let mut random = base::Random::new(7);
        for _ in 0..200 {
            let count = 2 + random.below(20) as u32;
            let buffers: Vec<Buffer> =
                (0..count).map(|_| sized(256 * (1 + random.below(9) as usize))).collect();
            let steps: Vec<PendingStep> = (1..count)
                .map(|i| {
                    step(
                        &[random.below(u64::from(i)) as u32, random.below(u64::from(i)) as u32],
                        &[i],
                    )
                })
                .collect();
            let mut arena = plan(&buffers, &steps);
            assert_eq!(collisions(&buffers, &steps, &arena), []);
            // The check can fail: two buffers of one step at the same offset.
            arena.offsets[0] = arena.offsets[steps.len()];
            let all = lifetimes(&buffers, &steps);
            if all[0].is_some_and(|life| life.last >= steps.len() - 1) {
                assert!(!collisions(&buffers, &steps, &arena).is_empty());
            }
        }
    }
}
