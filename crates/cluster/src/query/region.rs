//! Finds connected regions in a map of scores, as minimum-area rectangles in reading order.

use super::picture::Corners;

/// Criteria of a region.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RegionRules {
    /// Score from which a cell belongs to a region.
    pub threshold: f32,
    /// Minimum mean score of the rectangle.
    pub score_least: f32,
    /// How far rectangles are extended, in units of area over perimeter.
    pub grow: f32,
    /// Maximum number of regions; the best ones are used.
    pub most: usize,
}

/// Minimum edge of a rectangle, in cells of the map.
const EDGE_MIN: f32 = 3.0;
/// Rectangles whose upper edges are this close are on one line, in cells of the map.
const LINE: f32 = 10.0;
/// A rectangle this much higher than wide holds a vertical line of text.
const UPRIGHT: f32 = 1.5;

type Point = [f32; 2];

/// The rectangles of all regions of a map, in cells.
pub fn find(map: &[f32], width: usize, height: usize, rules: &RegionRules) -> Vec<Corners> {
    let mut seen = vec![false; map.len()];
    let mut found: Vec<(f32, Corners)> = Vec::new();
    for start in 0..map.len().min(width * height) {
        if seen[start] || map[start] <= rules.threshold {
            continue;
        }
        let outline = flood(map, width, height, rules.threshold, start, &mut seen);
        let Some((corners, wide, high)) = rectangle(&hull(outline)) else { continue };
        if wide.min(high) < EDGE_MIN {
            continue;
        }
        let score = mean_inside(map, width, height, &corners);
        if score < rules.score_least {
            continue;
        }
        let by = wide * high * rules.grow / (2.0 * (wide + high));
        found.push((score, grown(&corners, wide, high, by)));
    }
    if found.len() > rules.most {
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        found.truncate(rules.most);
    }
    in_reading_order(found.into_iter().map(|(_, corners)| upright(corners)).collect())
}

/// The leftmost and rightmost cells of each row of the region around `start`, which are marked as
/// visited.
fn flood(
    map: &[f32],
    width: usize,
    height: usize,
    threshold: f32,
    start: usize,
    seen: &mut [bool],
) -> Vec<Point> {
    let mut rows: std::collections::BTreeMap<usize, (usize, usize)> = Default::default();
    let mut open = vec![start];
    seen[start] = true;
    while let Some(cell) = open.pop() {
        let (x, y) = (cell % width, cell / width);
        let row = rows.entry(y).or_insert((x, x));
        *row = (row.0.min(x), row.1.max(x));
        for near_y in y.saturating_sub(1)..=(y + 1).min(height - 1) {
            for near_x in x.saturating_sub(1)..=(x + 1).min(width - 1) {
                let near = near_y * width + near_x;
                if !seen[near] && map[near] > threshold {
                    seen[near] = true;
                    open.push(near);
                }
            }
        }
    }
    let ends = |(y, (left, right)): (usize, (usize, usize))| {
        let (top, bottom) = (y as f32, y as f32 + 1.0);
        let (left, right) = (left as f32, right as f32 + 1.0);
        [[left, top], [right, top], [left, bottom], [right, bottom]]
    };
    rows.into_iter().flat_map(ends).collect()
}

/// The convex hull, starting at the leftmost point.
fn hull(mut points: Vec<Point>) -> Vec<Point> {
    points.sort_by(|a, b| a[0].total_cmp(&b[0]).then(a[1].total_cmp(&b[1])));
    points.dedup();
    let cross = |o: Point, a: Point, b: Point| {
        (a[0] - o[0]) * (b[1] - o[1]) - (a[1] - o[1]) * (b[0] - o[0])
    };
    let mut hull: Vec<Point> = Vec::new();
    for side in 0..2 {
        let base = hull.len();
        let ordered: Vec<Point> = match side {
            0 => points.clone(),
            _ => points.iter().rev().copied().collect(),
        };
        for point in ordered {
            while hull.len() >= base + 2
                && cross(hull[hull.len() - 2], hull[hull.len() - 1], point) <= 0.0
            {
                hull.pop();
            }
            hull.push(point);
        }
        hull.pop();
    }
    hull
}

/// The rectangle of minimum area around a hull: one of its sides lies on a side of the hull.
/// Returns it with its width and height; corners are clockwise from the upper left.
fn rectangle(hull: &[Point]) -> Option<(Corners, f32, f32)> {
    let mut best: Option<(f32, Corners, f32, f32)> = None;
    for index in 0..hull.len() {
        let (a, b) = (hull[index], hull[(index + 1) % hull.len()]);
        let length = (b[0] - a[0]).hypot(b[1] - a[1]);
        if length <= 0.0 {
            continue;
        }
        // The side's direction, rotated by 90 degrees until it points to the right.
        let mut along = [(b[0] - a[0]) / length, (b[1] - a[1]) / length];
        while along[0] < along[1].abs() - 1e-6 || along[0] <= 0.0 {
            along = [-along[1], along[0]];
        }
        let down = [-along[1], along[0]];
        let spread = |axis: Point| {
            let project = |point: &Point| point[0] * axis[0] + point[1] * axis[1];
            let values = hull.iter().map(project);
            values.fold((f32::MAX, f32::MIN), |(low, high), v| (low.min(v), high.max(v)))
        };
        let ((left, right), (top, bottom)) = (spread(along), spread(down));
        let (wide, high) = (right - left, bottom - top);
        if best.as_ref().is_none_or(|(area, ..)| wide * high < *area - 1e-3) {
            let corner = |u: f32, v: f32| [u * along[0] + v * down[0], u * along[1] + v * down[1]];
            let corners = [
                corner(left, top),
                corner(right, top),
                corner(right, bottom),
                corner(left, bottom),
            ];
            best = Some((wide * high, corners, wide, high));
        }
    }
    best.map(|(_, corners, wide, high)| (corners, wide, high))
}

fn mean_inside(map: &[f32], width: usize, height: usize, corners: &Corners) -> f32 {
    let bounds = |axis: usize, edge: usize| {
        let values = corners.iter().map(|corner| corner[axis]);
        let (low, high) = values.fold((f32::MAX, f32::MIN), |(l, h), v| (l.min(v), h.max(v)));
        (low.floor().max(0.0) as usize, (high.ceil().max(0.0) as usize).min(edge))
    };
    let ((left, right), (top, bottom)) = (bounds(0, width), bounds(1, height));
    let inside = |x: f32, y: f32| {
        (0..4).all(|side| {
            let (a, b) = (corners[side], corners[(side + 1) % 4]);
            (b[0] - a[0]) * (y - a[1]) - (b[1] - a[1]) * (x - a[0]) >= -1e-3
        })
    };
    let (mut sum, mut count) = (0.0, 0usize);
    for y in top..bottom {
        for x in left..right {
            if inside(x as f32 + 0.5, y as f32 + 0.5) {
                sum += map[y * width + x];
                count += 1;
            }
        }
    }
    if count == 0 { 0.0 } else { sum / count as f32 }
}

fn grown(corners: &Corners, wide: f32, high: f32, by: f32) -> Corners {
    let unit = |from: Point, to: Point, length: f32| {
        [(to[0] - from[0]) / length * by, (to[1] - from[1]) / length * by]
    };
    let (right, down) = (unit(corners[0], corners[1], wide), unit(corners[0], corners[3], high));
    let signs = [(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)];
    std::array::from_fn(|index| {
        let (u, v) = signs[index];
        let [x, y] = corners[index];
        [x + u * right[0] + v * down[0], y + u * right[1] + v * down[1]]
    })
}

/// A vertical line starts at its upper right.
fn upright(corners: Corners) -> Corners {
    let length = |a: Point, b: Point| (a[0] - b[0]).hypot(a[1] - b[1]);
    match length(corners[0], corners[3]) >= UPRIGHT * length(corners[0], corners[1]) {
        true => [corners[1], corners[2], corners[3], corners[0]],
        false => corners,
    }
}

/// Line by line, each from left to right.
fn in_reading_order(mut regions: Vec<Corners>) -> Vec<Corners> {
    regions.sort_by(|a, b| a[0][1].total_cmp(&b[0][1]));
    let mut lines: Vec<Vec<Corners>> = Vec::new();
    for corners in regions {
        let same = |line: &&mut Vec<Corners>| {
            line.last().is_some_and(|last| corners[0][1] - last[0][1] < LINE)
        };
        match lines.last_mut().filter(same) {
            Some(line) => line.push(corners),
            None => lines.push(vec![corners]),
        }
    }
    lines.iter_mut().for_each(|line| line.sort_by(|a, b| a[0][0].total_cmp(&b[0][0])));
    lines.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::*;

    const RULES: RegionRules =
        RegionRules { threshold: 0.3, score_least: 0.5, grow: 0.0, most: 100 };

    fn paint(width: usize, height: usize, inside: impl Fn(f32, f32) -> bool) -> Vec<f32> {
        let value = |index: usize| {
            let (x, y) = ((index % width) as f32 + 0.5, (index / width) as f32 + 0.5);
            if inside(x, y) { 0.9 } else { 0.0 }
        };
        (0..width * height).map(value).collect()
    }

    #[test]
    fn finds_boxes_in_reading_order_and_extends_them() {
        let map = paint(100, 60, |x, y| {
            (x > 50.0 && x < 90.0 && y > 8.0 && y < 18.0)
                || (x > 5.0 && x < 45.0 && y > 10.0 && y < 20.0)
                || (x > 5.0 && x < 45.0 && y > 40.0 && y < 50.0)
        });
        let found = find(&map, 100, 60, &RULES);
        let corners: Vec<Point> = found.iter().map(|corners| corners[0]).collect();
        assert_eq!(corners, [[5.0, 10.0], [50.0, 8.0], [5.0, 40.0]]);
        assert_eq!(found[0][2], [45.0, 20.0]);
        // Area 400 over perimeter 100: extended by twice that on each side.
        let grown = find(&map, 100, 60, &RegionRules { grow: 2.0, ..RULES });
        assert_eq!((grown[0][0], grown[0][2]), ([-3.0, 2.0], [53.0, 28.0]));
        assert_eq!(find(&map, 100, 60, &RegionRules { most: 1, ..RULES }).len(), 1);
        assert!(find(&map, 100, 60, &RegionRules { score_least: 0.95, ..RULES }).is_empty());
    }

    #[test]
    fn finds_tight_rotated_boxes() {
        let mut random = Random::new(5);
        for _ in 0..50 {
            let angle = (random.unit_f64() as f32 - 0.5) * 1.2;
            let (wide, high) = (40.0 + 60.0 * random.unit_f64() as f32, 12.0);
            let (sin, cos) = angle.sin_cos();
            let map = paint(160, 160, |x, y| {
                let (x, y) = (x - 80.0, y - 80.0);
                let (u, v) = (x * cos + y * sin, y * cos - x * sin);
                u.abs() < wide / 2.0 && v.abs() < high / 2.0
            });
            let found = find(&map, 160, 160, &RULES);
            assert_eq!(found.len(), 1);
            let [a, b, _, d] = found[0];
            let (width, height) =
                ((b[0] - a[0]).hypot(b[1] - a[1]), (d[0] - a[0]).hypot(d[1] - a[1]));
            assert!((width - wide).abs() < 3.0 && (height - high).abs() < 3.0, "{width} {height}");
            let seen = (b[1] - a[1]).atan2(b[0] - a[0]);
            assert!((seen - angle).abs() < 0.12, "{seen} {angle}");
        }
    }

    #[test]
    fn reads_vertical_lines_downwards() {
        let map = paint(40, 80, |x, y| x > 10.0 && x < 20.0 && y > 10.0 && y < 70.0);
        let [origin, right, _, down] = find(&map, 40, 80, &RULES)[0];
        assert_eq!((origin, right, down), ([20.0, 10.0], [20.0, 70.0], [10.0, 10.0]));
    }
}
