//! Python's `strftime` for the codes that templates use, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];

/// A moment in the calendar.
struct Date {
    year: i64,
    /// From 0.
    month: usize,
    /// From 1.
    day: i64,
    /// From 1.
    day_of_year: i64,
    /// From 0, Monday.
    weekday: usize,
    hour: i64,
    minute: i64,
    second: i64,
}

impl Date {
    fn of(time: SystemTime) -> Self {
        // Moments before 1970 are a clock that is not set.
        let seconds = time
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs())
            .min(1 << 40) as i64;
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        let leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        // 400 years have 146097 days; what is left is walked year by year.
        let mut year = 1970 + days / 146_097 * 400;
        let mut rest = days % 146_097;
        while rest >= 365 + i64::from(leap(year)) {
            rest -= 365 + i64::from(leap(year));
            year += 1;
        }
        let day_of_year = rest + 1;
        let lengths = [
            31,
            28 + i64::from(leap(year)),
            31,
            30,
            31,
            30,
            31,
            31,
            30,
            31,
            30,
            31,
        ];
        let mut month = 0;
        while rest >= lengths[month] {
            rest -= lengths[month];
            month += 1;
        }
        Date {
            year,
            month,
            day: rest + 1,
            day_of_year,
            // The first day of 1970 was a Thursday.
            weekday: ((days + 3) % 7) as usize,
            hour: second / 3600,
            minute: second / 60 % 60,
            second: second % 60,
        }
    }
}

/// The moment in this format; the error names a code that is not known.
pub(super) fn format(time: SystemTime, format: &str) -> Result<String, String> {
    let date = Date::of(time);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next();
        let unpadded = code == Some('-');
        if unpadded {
            code = chars.next();
        }
        let number = |value: i64, width: usize| {
            if unpadded {
                value.to_string()
            } else {
                format!("{value:0width$}")
            }
        };
        let twelve = (date.hour + 11) % 12 + 1;
        let text = match code {
            Some('Y') => date.year.to_string(),
            Some('y') => number(date.year % 100, 2),
            Some('m') => number(date.month as i64 + 1, 2),
            Some('d') => number(date.day, 2),
            Some('e') => format!("{:2}", date.day),
            Some('j') => number(date.day_of_year, 3),
            Some('H') => number(date.hour, 2),
            Some('I') => number(twelve, 2),
            Some('M') => number(date.minute, 2),
            Some('S') => number(date.second, 2),
            Some('p') => if date.hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => MONTHS[date.month].to_owned(),
            Some('b' | 'h') => MONTHS[date.month][..3].to_owned(),
            Some('A') => DAYS[date.weekday].to_owned(),
            Some('a') => DAYS[date.weekday][..3].to_owned(),
            Some('F') => format!("{}-{:02}-{:02}", date.year, date.month + 1, date.day),
            Some('T') => format!("{:02}:{:02}:{:02}", date.hour, date.minute, date.second),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => return Err(format!("strftime_now does not know %{other}")),
            None => return Err("strftime_now: the format ends with %".to_owned()),
        };
        out.push_str(&text);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64, code: &str) -> String {
        format(UNIX_EPOCH + Duration::from_secs(seconds), code).expect("known codes")
    }

    #[test]
    fn known_moments() {
        assert_eq!(
            at(0, "%A %d %B %Y %H:%M:%S %j"),
            "Thursday 01 January 1970 00:00:00 001"
        );
        assert_eq!(
            at(951_826_332, "%F %T %a %b %j"),
            "2000-02-29 12:12:12 Tue Feb 060"
        );
        assert_eq!(
            at(1_735_689_599, "%d %b %Y %I %p %-d/%-m/%y %j"),
            "31 Dec 2024 11 PM 31/12/24 366"
        );
        assert_eq!(at(1_741_003_200, "%e|%-d|%Z%z|%%"), " 3|3|UTC+0000|%");
        assert_eq!(at(4_107_542_399, "%F"), "2100-02-28");
        assert_eq!(at(4_107_542_400, "%F"), "2100-03-01");
    }

    #[test]
    fn unknown_codes_are_named() {
        assert!(
            format(UNIX_EPOCH, "%Q")
                .expect_err("unknown")
                .contains("%Q")
        );
        assert!(format(UNIX_EPOCH, "x%").is_err());
    }
}
