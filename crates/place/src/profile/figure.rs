//! One measured number and how sure it is.

use std::fmt;

use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A measured value and its spread, both in the unit that the field's name says.
///
/// As text a figure is `{"value": 54.1, "spread": 0.4}`, or a bare number where nothing is known of the spread.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figure {
    /// The median of the readings.
    pub value: f64,
    /// Half the width of the band that holds the middle of the readings (a quarter left out on each side); 0 if unknown.
    pub spread: f64,
}

impl Figure {
    /// A value of which no spread is known.
    pub const fn exact(value: f64) -> Self {
        Self { value, spread: 0.0 }
    }

    /// The median of some readings and their spread; `None` without readings, or if one is NaN.
    pub fn of_readings(readings: &[f64]) -> Option<Self> {
        if readings.is_empty() || readings.iter().any(|r| r.is_nan()) {
            return None;
        }
        let mut sorted = readings.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |part: f64| {
            let place = part * (sorted.len() - 1) as f64;
            let (low, high) = (place.floor() as usize, place.ceil() as usize);
            sorted[low] + (sorted[high] - sorted[low]) * (place - low as f64)
        };
        Some(Self {
            value: at(0.5),
            spread: (at(0.75) - at(0.25)) / 2.0,
        })
    }

    /// Whether `new` differs from this by more than twice the larger spread, so that it is no noise.
    pub fn differs(&self, new: &Self) -> bool {
        (new.value - self.value).abs() > 2.0 * self.spread.max(new.spread)
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Three digits say as much as a measurement knows.
        let digits = |x: f64| match x.abs() {
            a if a >= 100.0 || a == 0.0 => 0,
            a if a >= 10.0 => 1,
            a if a >= 1.0 => 2,
            a if a >= 0.01 => 4,
            _ => 6,
        };
        let precision = digits(self.value);
        write!(f, "{:.*}", precision, self.value)?;
        if self.spread > 0.0 {
            write!(f, " ± {:.*}", precision, self.spread)?;
        }
        Ok(())
    }
}

impl Serialize for Figure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.spread == 0.0 {
            return serializer.serialize_f64(self.value);
        }
        let mut out = serializer.serialize_struct("Figure", 2)?;
        out.serialize_field("value", &self.value)?;
        out.serialize_field("spread", &self.spread)?;
        out.end()
    }
}

impl<'de> Deserialize<'de> for Figure {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FigureVisitor)
    }
}

/// Reads both forms; an untagged enum would answer every mistake with the same words.
struct FigureVisitor;

impl<'de> Visitor<'de> for FigureVisitor {
    type Value = Figure;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, or {\"value\": number, \"spread\": number}")
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Figure, E> {
        Ok(Figure::exact(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Figure, E> {
        Ok(Figure::exact(value as f64))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Figure, E> {
        Ok(Figure::exact(value as f64))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Figure, A::Error> {
        let (mut value, mut spread) = (None, 0.0);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "value" => value = Some(map.next_value()?),
                "spread" => spread = map.next_value()?,
                other => return Err(de::Error::unknown_field(other, &["value", "spread"])),
            }
        }
        let value = value.ok_or_else(|| de::Error::missing_field("value"))?;
        Ok(Figure { value, spread })
    }
}
