//! Predicted tokens a second against spill, a line for each tier, as SVG.

use std::fmt::Write as _;

use crate::decide::{Plan, TierPlan};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 170.0;
const TOP: f64 = 46.0;
const BOTTOM: f64 = 56.0;

/// Colours that stay apart for colour-blind readers, and in grey.
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

/// Marks on an axis, about this many.
const TICKS: f64 = 6.0;

/// One tier's line, in MiB and tokens a second.
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
    spill_mib: f64,
    t_star_mib: f64,
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl Line {
    fn of(tier: &TierPlan) -> Self {
        let points = tier.curve.iter().map(|p| (mib(p.spill_bytes), p.tok_s));
        let finite = |p: &(f64, f64)| p.0.is_finite() && p.1.is_finite();
        Self {
            name: tier.tier().to_string(),
            points: points.filter(finite).collect(),
            spill_mib: mib(tier.over_bytes),
            t_star_mib: mib(tier.t_star_bytes),
        }
    }

    /// Its height at `x`, between the points beside it.
    fn at(&self, x: f64) -> Option<f64> {
        let pairs = self.points.windows(2);
        let beside = pairs.into_iter().find(|w| w[0].0 <= x && x <= w[1].0)?;
        let [(x0, y0), (x1, y1)] = [beside[0], beside[1]];
        let part = if x1 > x0 { (x - x0) / (x1 - x0) } else { 0.0 };
        Some(y0 + (y1 - y0) * part)
    }
}

/// A round step that gives about [`TICKS`] marks up to `most`.
fn step(most: f64) -> f64 {
    let rough = most / TICKS;
    let power = 10_f64.powf(rough.log10().floor());
    let of = rough / power;
    let round = match of {
        x if x <= 1.0 => 1.0,
        x if x <= 2.0 => 2.0,
        x if x <= 5.0 => 5.0,
        _ => 10.0,
    };
    round * power
}

/// Text as XML holds it. What XML cannot hold at all is left out.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => out.push(c),
        }
    }
    out
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, content: &str) {
    let content = escape(content);
    let _ = writeln!(
        out,
        r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{content}</text>"#
    );
}

/// A plot of a plan: a line for each tier, a dot where this machine's budget puts it, a bar at its `T*`.
pub fn svg(plan: &Plan) -> String {
    let lines: Vec<Line> = plan.tiers.iter().map(Line::of).collect();
    let points = || lines.iter().flat_map(|l| &l.points);
    let most = |values: &mut dyn Iterator<Item = f64>| {
        let most = values.fold(0.0, f64::max);
        if most > 0.0 { most } else { 1.0 }
    };
    let x_most = most(&mut points().map(|p| p.0));
    let y_most = most(&mut points().map(|p| p.1)) * 1.05;
    let x = |mib: f64| LEFT + (WIDTH - LEFT - RIGHT) * mib / x_most;
    let y = |tok_s: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * tok_s / y_most;

    let mut out = String::new();
    let _ = writeln!(
        out,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" fill="#222">
<rect width="100%" height="100%" fill="#fff"/>"##
    );
    let title = format!(
        "{}, {} cells, {} ({})",
        plan.model, plan.n_ctx, plan.profile, plan.profile_source
    );
    text(&mut out, LEFT, 24.0, "start", &title);
    grid(&mut out, x_most, y_most, &x, &y);
    if points().next().is_none() {
        text(
            &mut out,
            WIDTH / 2.0,
            HEIGHT / 2.0,
            "middle",
            "nothing can be spilled on this machine",
        );
    }
    for (i, line) in lines.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let mut path = String::new();
        for &(mib, tok_s) in &line.points {
            let _ = write!(path, "{:.1},{:.1} ", x(mib), y(tok_s));
        }
        let path = path.trim_end();
        let _ = writeln!(
            out,
            r#"<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>"#
        );
        if let Some(tok_s) = line.at(line.spill_mib) {
            let (cx, cy) = (x(line.spill_mib), y(tok_s));
            let _ = writeln!(
                out,
                r#"<circle cx="{cx:.1}" cy="{cy:.1}" r="5" fill="{colour}"/>"#
            );
        }
        if let Some(tok_s) = line.at(line.t_star_mib) {
            let (x, y) = (x(line.t_star_mib), y(tok_s));
            let (above, below) = (y - 9.0, y + 9.0);
            let _ = writeln!(
                out,
                r#"<line x1="{x:.1}" y1="{above:.1}" x2="{x:.1}" y2="{below:.1}" stroke="{colour}" stroke-width="3"/>"#
            );
        }
        let at = TOP + 20.0 * i as f64 + 10.0;
        let from = WIDTH - RIGHT + 16.0;
        let to = from + 22.0;
        let _ = writeln!(
            out,
            r#"<line x1="{from:.1}" y1="{at:.1}" x2="{to:.1}" y2="{at:.1}" stroke="{colour}" stroke-width="2"/>"#
        );
        let chosen = if line.name == plan.choice {
            " (chosen)"
        } else {
            ""
        };
        let name = format!("{}{chosen}", line.name);
        text(&mut out, to + 6.0, at + 4.0, "start", &name);
    }
    let at = TOP + 20.0 * lines.len() as f64 + 16.0;
    let from = WIDTH - RIGHT + 16.0;
    text(&mut out, from, at, "start", "dot: this budget");
    text(&mut out, from, at + 18.0, "start", "bar: T*");
    out.push_str("</svg>\n");
    out
}

fn grid(
    out: &mut String,
    x_most: f64,
    y_most: f64,
    x: &dyn Fn(f64) -> f64,
    y: &dyn Fn(f64) -> f64,
) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let marks = |most: f64| {
        let step = step(most);
        // A step is at least a tenth of a sixth, so there are few marks, whatever the numbers are.
        (0..=60_u32)
            .map(move |i| f64::from(i) * step)
            .take_while(move |&at| at <= most)
    };
    for at in marks(x_most) {
        let px = x(at);
        let _ = writeln!(
            out,
            r##"<line x1="{px:.1}" y1="{TOP}" x2="{px:.1}" y2="{bottom}" stroke="#ddd"/>"##
        );
        text(out, px, bottom + 18.0, "middle", &number(at));
    }
    for at in marks(y_most) {
        let py = y(at);
        let _ = writeln!(
            out,
            r##"<line x1="{LEFT}" y1="{py:.1}" x2="{right}" y2="{py:.1}" stroke="#ddd"/>"##
        );
        text(out, LEFT - 8.0, py + 4.0, "end", &number(at));
    }
    let middle = f64::midpoint(LEFT, right);
    text(
        out,
        middle,
        HEIGHT - 14.0,
        "middle",
        "KV in host memory, MiB",
    );
    text(out, LEFT, TOP - 6.0, "end", "tok/s");
}

fn number(x: f64) -> String {
    if x >= 10.0 || x == 0.0 {
        format!("{x:.0}")
    } else {
        format!("{x:.3}")
            .trim_end_matches('0')
            .trim_end_matches('.')
            .to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round() {
        for (most, expected) in [
            (6.0, 1.0),
            (7.0, 2.0),
            (100.0, 20.0),
            (0.05, 0.01),
            (3e5, 5e4),
        ] {
            assert!((step(most) / expected - 1.0).abs() < 1e-9, "{most}");
        }
    }

    #[test]
    fn names_cannot_leave_their_text() {
        assert_eq!(escape("a<b>&\"c\u{0}\u{ffff}"), "a&lt;b&gt;&amp;&quot;c");
    }

    #[test]
    fn lines_are_straight_between_points() {
        let line = Line {
            name: String::new(),
            points: vec![(0.0, 10.0), (4.0, 2.0)],
            spill_mib: 0.0,
            t_star_mib: 0.0,
        };
        assert_eq!(line.at(1.0), Some(8.0));
        assert_eq!(line.at(5.0), None);
    }
}
